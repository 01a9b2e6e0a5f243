"""What a report says of a run or of a study: its conditions in a line, its share of the peak, and doubts about its times."""

from collections.abc import Mapping
from typing import Any

from common.analysis.formulas import peaks
from common.analysis.output import tables
from common.records.run_record import Run, TimedRun

FEW_STEPS = 10  # fewer timed steps make a median doubtful
NOISY = 30  # %: so does a wider spread from p20 to p80, as a share of the median


def peak_flops(run: Run) -> float | None:
    """FLOP/s of the run's device in its number format by the data sheet; None if that is not listed."""
    return peaks.flops_per_second(run["device"]["name"], run["precision"]["compute"], run["precision"]["tf32"])


def mfu(run: TimedRun) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311): FLOP/s in percent of `peak_flops`, or None."""
    peak = peak_flops(run)
    return 100 * run["flops_per_second"] / peak if peak else None


def of_measured_gemm(run: TimedRun) -> float | None:
    """FLOP/s in percent of the matrix product that the run itself measured; None if it measured none."""
    return 100 * run["flops_per_second"] / run["ceilings"]["flops_per_second"] if run["ceilings"] else None


def describe(run: Mapping[str, Any], *varied: str) -> str:
    """Device, number format, PyTorch and shape of a run, or of a study that holds the same keys, in one line.

    Args:
        varied: the keys of `training` that differ between the runs that the line stands for; they are left out.
    """
    device, precision, training = run["device"], run["precision"], run["training"]
    threads = f"{device['threads']} threads" if device.get("threads") else ""
    compute = precision["compute"] + " (TF32 allowed)" * precision.get("tf32", False)
    sizes = [f"{name.replace('_', ' ')} {training[name]}" for name in ("batch_size", "sequence_length") if name not in varied]
    parts = [device["name"], threads, compute, f"torch {run['environment']['torch']}", *sizes]
    return f"{', '.join(filter(None, parts))}; {tables.letters(run['model'])}"


def noise(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note that names the step times whose spread from p20 to p80 is too wide; nothing if none is.

    Args:
        steps: summaries (median, p20, p80) under the names by which the table shows them.
    """
    spreads = {name: 100 * (step["p80"] - step["p20"]) / step["median"] for name, step in steps.items()}
    noisy = [f"{name} ({spread:.0f} %)" for name, spread in spreads.items() if round(spread, 6) > NOISY]
    return [f"Noisy: p20 to p80 spans more than {NOISY} % of the median for {', '.join(noisy)}."] if noisy else []


def doubts(runs: Mapping[str, TimedRun]) -> list[str]:
    """Notes that name runs whose step times are not to be relied on: profiled, few or noisy steps.

    Args:
        runs: records with a finished step, under the names by which the table shows them.
    """
    slowed = [name for name, run in runs.items() if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"])]
    notes = [f"All steps of {', '.join(slowed)} ran under the profiler, which slows them: raise --num-steps."] * bool(slowed)
    few = min(run["step_ms"]["count"] for run in runs.values())
    if few < FEW_STEPS:
        notes.append(f"A median is of only {few} timed steps: raise --num-steps.")
    return notes + noise({name: run["step_ms"] for name, run in runs.items()})


def origin(run: Mapping[str, Any]) -> str:
    """The command of a run, its time, and how the switches of the version's own stood, where the record has them."""
    parts = [f"`{run['command']}` on {run['date']}"]
    for name, value in run.get("settings", {}).items():
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)
