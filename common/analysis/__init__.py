"""Analysis of files that runs left behind: formulas, traces, tables, plots and reports. Nothing here touches a device."""
