"""The benchmark: versions and external baselines at equal shapes.

In reading order: `benchmark_cells` plans and measures, `benchmark_process` is what one process does, `benchmark_file` is the file
in between, and `benchmark_results` and `benchmark_report` make numbers, tables and pictures of it.
"""
