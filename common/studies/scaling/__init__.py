"""The scaling study: training over processes, in weak and in strong scaling, beside a model on paper.

In reading order: `scaling_cells` plans and measures, `scaling_job` is one job of it, which `torchrun` starts, and `link` measures
the link that the model on paper needs. `scaling_file` is the file in between. `scaling_results` holds the model on paper and the
numbers, and `scaling_report` makes tables and pictures of them.
"""
