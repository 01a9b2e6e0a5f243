"""Records of runs side by side: how their step times spread, and whether their losses are those of
the first, bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path

from tracepage.records import run_record
from tracepage.show import run_facts, tables
from tracepage.show.report import Report

SLOW = 2  # times the median


def render_runs(paths: Sequence[Path]) -> Report:
    """Step times, losses and measured ceilings, a row per run."""
    runs = [(path, run_record.read_timed(path)) for path in paths]
    first = runs[0][1]
    times = []
    others = []
    for path, run in runs:
        step = run["step_ms"]
        ms = step["all"][: step["count"]]
        slow = sum(time > SLOW * step["median"] for time in ms)
        middle = [step["median"], tables.spread(step), sum(ms) / len(ms)]
        times.append([path.name, len(ms), ms[0], *middle, max(ms), slow])
        losses = run["loss"]["all"]
        same = None
        if run is not first:
            same = "yes" if losses == first["loss"]["all"] else "no"
        rates: list[object] = [None] * 3
        ceilings = run["ceilings"]
        if ceilings:
            rates = [
                ceilings["flops_per_second"] / 1e12,
                ceilings["bytes_per_second"] / 1e9,
                1e6 * ceilings["operation_seconds"],
            ]
        ends = [f"{losses[0]:.3f}", f"{run_facts.last_loss(run):.3f}"]
        others.append([path.name, *ends, same, *rates])
    report = Report("Runs")
    report.facts([(path.name, run_facts.describe(run)) for path, run in runs])
    header = ["run", "steps", "first ms", "median ms", "p20 to p80", "mean ms", "longest ms"]
    header.append(f"over {SLOW} x median")
    report.table(header, times, title="Steps without the profiler")
    header = ["run", "first loss", "mean of the last 20", "losses as in the first run"]
    header += ["GEMM TFLOP/s", "copy GB/s", "small operation us"]
    title = "Losses, and the ceilings that a run measured"
    report.table(*tables.filled(header, others), title=title)
    return report
