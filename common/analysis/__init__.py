"""Analysis of files that runs left behind: formulas, traces, tables, plots and reports. Nothing here touches a device.

A function raises UsageError, whose one line names the reason, if a file that it reads is missing, damaged, of another kind, or
holds too little for the analysis, if two files cannot be compared, or if it cannot write. Docstrings name what is not obvious.
"""
