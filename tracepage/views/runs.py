"""Records of runs side by side: how their step times spread, and whether their losses are those of
the first, bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path

from tracepage.records import run_record
from tracepage.show import run_facts, tables
from tracepage.show.report import Report

SLOW = 2  # times the median


def show(paths: Sequence[Path]) -> Report:
    """Step times, losses and measured ceilings, a row per run."""
    runs = [run_record.read_timed(path) for path in paths]
    times: list[list[object]] = []
    others: list[list[object]] = []
    for path, run in zip(paths, runs, strict=True):
        step = run["step_ms"]
        losses = run["loss"]["all"]
        ceilings = run["ceilings"]
        kept = step["all"][: step["count"]]
        slow = sum(ms > SLOW * step["median"] for ms in kept)
        mean = sum(kept) / len(kept)
        range_ = tables.spread(step)
        times.append([path.name, len(kept), kept[0], step["median"], range_, mean, max(kept), slow])
        same = None if run is runs[0] else "yes" if losses == runs[0]["loss"]["all"] else "no"
        rates: list[object] = [None] * 3
        if ceilings:
            rates = [
                ceilings["flops_per_second"] / 1e12,
                ceilings["bytes_per_second"] / 1e9,
                1e6 * ceilings["operation_seconds"],
            ]
        others.append(
            [path.name, f"{losses[0]:.3f}", f"{run_facts.last_loss(run):.3f}", same, *rates]
        )
    result = Report("Runs")
    result.facts(
        [(path.name, run_facts.describe(run)) for path, run in zip(paths, runs, strict=True)]
    )
    header = [
        "run",
        "steps",
        "first ms",
        "median ms",
        "p20 to p80",
        "mean ms",
        "longest ms",
        f"over {SLOW} x median",
    ]
    result.table(header, times, title="Steps without the profiler")
    header = ["run", "first loss", "mean of the last 20", "losses as in the first run"]
    header += ["GEMM TFLOP/s", "copy GB/s", "small operation us"]
    result.table(
        *tables.filled(header, others), title="Losses, and the ceilings that a run measured"
    )
    return result
