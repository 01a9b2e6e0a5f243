"""Two run records: is the second run as fast as it should be, and does it learn the same?

Runs are compared where a difference can come from the code: same device, model, batch, sequence
length, number format and PyTorch. The speed-up is median(baseline) / median(current) of ms per
step. Losses are compared step by step where data, seed and learning rate are the same.
"""

from pathlib import Path
from typing import NamedTuple

from tracepage.errors import UsageError
from tracepage.records import run_record
from tracepage.show import run_facts, run_pair
from tracepage.show.report import Report


class Verdict(NamedTuple):
    """The comparison, and why it is a regression (empty: it is none)."""

    report: Report
    failures: list[str]


def render_regression(
    baseline: Path, current: Path, min_speedup: float, loss_tolerance: float
) -> Verdict:
    """Compares two run records.

    A smaller speed-up, or a larger difference of the loss curves in nats, is a regression.
    UsageError: the two cannot be compared.
    """
    before = run_record.read(baseline)
    after = run_record.read(current)
    records = ((baseline, before), (current, after))
    reasons = run_record.incomparable(*records)
    for path, run in records:
        losses = len(run["loss"]["all"])
        steps = len(run["step_ms"]["all"])
        if losses != steps:
            reasons.append(f"{path.name} has losses of {losses} steps, and {steps} were timed")
    if reasons or not (run_record.finished(before) and run_record.finished(after)):
        raise UsageError(
            f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; "
            "measure both again, alike"
        )
    failures = []
    speedup = before["step_ms"]["median"] / after["step_ms"]["median"]
    if not speedup >= min_speedup:
        failures.append(f"the speed-up {speedup:.6g} is below {min_speedup:g}")
    loss, _ = run_record.loss_difference(before, after)
    if not run_pair.input_differences(before, after) and not loss <= loss_tolerance:
        failures.append(f"the loss curves differ by {loss:.2g}, more than {loss_tolerance:g}")
    verdict = f"PASS: the speed-up is at least {min_speedup:g}"
    if failures:
        verdict = f"FAIL: {'; '.join(failures)}"
    report = Report("Regression test")
    run_pair.add_runs(report, {"baseline": (baseline, before), "current": (current, after)})
    report.text(f"Speed-up {speedup:.3g}. {run_facts.ONE_PROCESS}", verdict)
    return Verdict(report, failures)
