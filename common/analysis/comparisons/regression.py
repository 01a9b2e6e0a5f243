"""Whether a run is as fast as it should be, and learns the same, against the record of an earlier run.

Both are records of schema tiny-llama-run/1 (`--metrics-out`). They are only compared where a difference can come from the
code: same device, model, batch, sequence length, number format and PyTorch, both completed.

    speed-up        median(baseline) / median(current), of ms per step; above 1: current is faster
    its range       p20(baseline) / p80(current) to p80(baseline) / p20(current)
    memory ratio    peak(baseline) / peak(current); above 1: current needs less
    loss            largest |baseline - current| over the steps that both have; needs the same data, seed and learning
                    rate, since another batch gives another loss
"""

from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.output import tables
from common.analysis.profiles import run_record
from common.analysis.profiles.run_record import SCHEMA as RUN_SCHEMA
from common.errors import UsageError
from common.files import read_json


class Verdict(NamedTuple):
    """What was found, for the terminal, and why it is a regression (empty: it is none)."""

    text: str
    failures: list[str]


def compare(baseline: Path, current: Path, min_speedup: float, loss_tolerance: float) -> Verdict:
    """Compares two run records.

    Args:
        min_speedup: a smaller speed-up is a regression.
        loss_tolerance: nats; a larger difference of the loss curves is one as well.

    Raises:
        UsageError: a file is no run record, or the two cannot be compared; names every reason.
    """
    before, after = read_json(baseline, RUN_SCHEMA), read_json(current, RUN_SCHEMA)
    reasons = [reason for path, run in ((baseline, before), (current, after)) for reason in run_record.unusable(path, run)]
    reasons += run_record.differences(run_record.conditions(before), run_record.conditions(after))
    if reasons:
        raise UsageError(f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; measure both again, alike")

    ours, theirs = before["step_ms"], after["step_ms"]
    speedup = ours["median"] / theirs["median"]
    slowest, fastest = ours["p20"] / theirs["p80"], ours["p80"] / theirs["p20"]
    differing = run_record.differences(run_record.training_inputs(before), run_record.training_inputs(after))
    loss, steps = run_record.loss_difference(before, after)
    failures = []
    if not speedup >= min_speedup:
        failures.append(f"the speed-up {speedup:.6g} is below {min_speedup:g}")
    if not differing and not loss <= loss_tolerance:
        failures.append(f"the loss curves differ by {loss:.2g}, more than {loss_tolerance:g}")

    notes = [
        f"loss curves: not compared, they differ in {'; '.join(differing)}"
        if differing
        else f"loss curves: largest difference {loss:.2g} nats over {steps} steps"
    ]
    if slowest < 1 < fastest:
        notes.append("the step times of the two overlap (the range holds 1): the difference is within their spread")
    few = min(ours["count"], theirs["count"])
    if few < run_record.FEW_STEPS:
        notes.append(f"as few as {few} timed steps stand behind a median: raise --num-steps")
    text = "\n".join([
        run_record.setting(before), "", tables.text(["", "baseline", "current", "baseline / current"], rows(before, after, steps)), "",
        f"speed-up {speedup:.3g}, from {slowest:.3g} to {fastest:.3g} by the 20th and 80th percentiles", *notes,
        f"FAIL: {'; '.join(failures)}" if failures else f"PASS: the speed-up is at least {min_speedup:g}",
    ])  # fmt: skip
    return Verdict(text, failures)


def rows(before: dict[str, Any], after: dict[str, Any], steps: int) -> list[list[object]]:
    """Name, value before, value after and their ratio, of step times, throughput, memory and the loss at step `steps`."""

    def row(name: str, *keys: str) -> list[object]:
        ours, theirs = before, after
        for key in keys:
            ours, theirs = ours[key], theirs[key]
        return [name, ours, theirs, ours / theirs]

    return [
        ["version", before["version"], after["version"], None],
        row("ms/step, median", "step_ms", "median"),
        row("ms/step, p20", "step_ms", "p20"),
        row("ms/step, p80", "step_ms", "p80"),
        row("timed steps", "step_ms", "count")[:3] + [None],
        row("tokens/s", "tokens_per_second")[:3] + [None],
        row(f"peak MiB ({before['memory']['kind']})", "memory", "peak_mib"),
        [f"loss at step {steps}", before["loss"]["all"][steps - 1], after["loss"]["all"][steps - 1], None],
    ]
