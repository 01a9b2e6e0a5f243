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

import numpy as np

from common.analysis import tables
from common.analysis.profile_report import RUN_SCHEMA
from common.analysis.scaling import identity
from common.errors import UsageError
from common.files import read_json

FEW_STEPS = 10


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
    reasons = [reason for path, run in ((baseline, before), (current, after)) for reason in unusable(path, run)]
    reasons += differences(conditions(before), conditions(after))
    if reasons:
        raise UsageError(f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; measure both again, alike")

    ours, theirs = before["step_ms"], after["step_ms"]
    speedup = ours["median"] / theirs["median"]
    slowest, fastest = ours["p20"] / theirs["p80"], ours["p80"] / theirs["p20"]
    differing = differences(lessons(before), lessons(after))
    loss, steps = loss_difference(before, after)
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
    if few < FEW_STEPS:
        notes.append(f"as few as {few} timed steps stand behind a median: raise --num-steps")
    text = "\n".join([
        setting(before), "", tables.text(["", "baseline", "current", "baseline / current"], rows(before, after, steps)), "",
        f"speed-up {speedup:.3g}, from {slowest:.3g} to {fastest:.3g} by the 20th and 80th percentiles", *notes,
        f"FAIL: {'; '.join(failures)}" if failures else f"PASS: the speed-up is at least {min_speedup:g}",
    ])  # fmt: skip
    return Verdict(text, failures)


def unusable(path: Path, run: dict[str, Any]) -> list[str]:
    """Why this run's step times say nothing."""
    if run["status"] != "completed":
        return [f"{path.name} was not completed ({run['status']})"]
    if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"]):
        return [f"all steps of {path.name} ran under the profiler, which slows them"]
    return []


def conditions(run: dict[str, Any]) -> dict[str, Any]:
    """What a step's time depends on besides the code."""
    return {"batch size": run["training"]["batch_size"]} | {k: v for k, v in identity(run).items() if k != "version"}


def lessons(run: dict[str, Any]) -> dict[str, Any]:
    """What a loss curve depends on besides the code, with the conditions above equal."""
    training = {key.replace("_", " "): run["training"][key] for key in ("seed", "learning_rate")}
    return {"data": run["data"]["name"], "data sha256": run["data"]["sha256"][:12]} | training


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs between two sets of conditions or lessons, with both values."""
    return [f"{name} ({ours[name]} and {theirs[name]})" for name in ours if ours[name] != theirs[name]]


def loss_difference(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, int]:
    """The largest difference in nats over the steps that both have, NaN if one is, and how many these are."""
    pairs = list(zip(before["loss"]["all"], after["loss"]["all"], strict=False))
    return float(np.max([abs(ours - theirs) for ours, theirs in pairs])), len(pairs)


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


def setting(run: dict[str, Any]) -> str:
    """Device, number format, PyTorch and shape of a run, in a line."""
    training, precision, model = run["training"], run["precision"], run["model"]
    shape = f"batch size {training['batch_size']}, sequence length {training['sequence_length']}"
    tf32 = " (TF32 allowed)" if precision["tf32"] else ""
    return (
        f"{run['device']['name']}, {precision['compute']}{tf32}, torch {run['environment']['torch']}, {shape}, "
        f"D {model['hidden_size']}, L {model['num_layers']}"
    )
