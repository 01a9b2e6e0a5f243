"""Whether a run is as fast as it should be, and learns the same, against the record of an earlier run.

Both are records of schema tiny-llama-run/1 (`--metrics-out`). They are only compared where a difference can come from the
code: same device, model, batch, sequence length, number format and PyTorch, both completed.

    speed-up        median(baseline) / median(current), of ms per step; above 1: current is faster
    its range       p20(baseline) / p80(current) to p80(baseline) / p20(current)
    memory ratio    peak(baseline) / peak(current); above 1: current needs less
    loss            largest |baseline - current| over the steps that both have; needs the same data, seed and learning
                    rate, since another batch gives another loss
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.output import run_facts
from common.analysis.output.report import Report
from common.errors import UsageError
from common.records import run_record


class Verdict(NamedTuple):
    """The comparison, and why it is a regression (empty: it is none)."""

    report: Report
    failures: list[str]


def compare(baseline: Path, current: Path, min_speedup: float, loss_tolerance: float) -> Verdict:
    """Compares two run records.

    Args:
        min_speedup: a smaller speed-up is a regression.
        loss_tolerance: nats; a larger difference of the loss curves is one as well.

    Raises:
        UsageError: a file is no run record, or the two cannot be compared; names every reason.
    """
    before, after = run_record.read(baseline), run_record.read(current)
    reasons = [reason for path, run in ((baseline, before), (current, after)) for reason in run_record.unusable(path, run)]
    reasons += run_record.differences(run_record.conditions(before), run_record.conditions(after))
    if reasons:
        raise UsageError(f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; measure both again, alike")

    ours, theirs = before["step_ms"], after["step_ms"]
    speedup = ours["median"] / theirs["median"]
    slowest, fastest = ours["p20"] / theirs["p80"], ours["p80"] / theirs["p20"]
    differing = run_record.differences(run_record.training_inputs(before), run_record.training_inputs(after))
    loss, steps = run_record.loss_difference(before, after)
    losses = f"not compared, they differ in {'; '.join(differing)}"
    failures = [] if speedup >= min_speedup else [f"the speed-up {speedup:.6g} is below {min_speedup:g}"]
    if not differing:
        losses = f"largest difference {loss:.2g} nats over {steps} steps"
        failures += [] if loss <= loss_tolerance else [f"the loss curves differ by {loss:.2g}, more than {loss_tolerance:g}"]

    report = Report("Regression test")
    report.text(run_facts.describe(before))
    table = [["version", before["version"], after["version"], None], *rows(before, after, steps)]
    report.table(["", "baseline", "current", "baseline / current"], table)
    report.text(
        f"Speed-up {speedup:.3g}, from {slowest:.3g} to {fastest:.3g} by the 20th and 80th percentiles.",
        f"Loss curves: {losses}.",
    )
    if slowest < 1 < fastest:
        report.text("The step times of the two overlap (the range holds 1): the difference is within their spread.")
    report.text(*run_facts.doubts({"baseline": before, "current": after}))
    report.text(f"FAIL: {'; '.join(failures)}" if failures else f"PASS: the speed-up is at least {min_speedup:g}")
    return Verdict(report, failures)


def rows(before: dict[str, Any], after: dict[str, Any], steps: int) -> list[list[object]]:
    """Name, value before, value after and their ratio: step times, throughput, memory, parameters, the loss at step `steps`."""

    def row(name: str, value: Callable[[dict[str, Any]], float], with_ratio: bool = False) -> list[object]:
        ours, theirs = value(before), value(after)
        return [name, ours, theirs, ours / theirs if with_ratio else None]

    return [
        row("ms/step, median", lambda run: run["step_ms"]["median"], True),
        row("ms/step, p20", lambda run: run["step_ms"]["p20"], True),
        row("ms/step, p80", lambda run: run["step_ms"]["p80"], True),
        row("timed steps", lambda run: run["step_ms"]["count"]),
        row("tokens/s", lambda run: run["tokens_per_second"]),
        row(f"peak MiB ({before['memory']['kind']})", lambda run: run["memory"]["peak_mib"], True),
        row("parameters", lambda run: run["parameters"]),
        row(f"loss at step {steps}", lambda run: run["loss"]["all"][steps - 1]),
    ]
