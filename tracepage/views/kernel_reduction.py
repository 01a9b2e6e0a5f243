"""Two profiles: which launches of the first are gone in the second?"""

from pathlib import Path

from tracepage.readers import load_kernels
from tracepage.show.report import Report
from tracepage.views import launch_changes


def render_kernel_reduction(baseline: Path, fused: Path, top: int) -> Report:
    """The launches of two runs: tables, of the `top` first names, and a CSV with all names."""
    reduction = launch_changes.compare_launches(
        load_kernels.load(baseline), load_kernels.load(fused)
    )
    report = Report("Kernel reduction", reduction.paths)
    report.text(*reduction.conditions)
    launch_changes.add_section(report, reduction, "kernel_reduction", top)
    return report
