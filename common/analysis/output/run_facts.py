"""What a report says of a run or of a study: its conditions in a line, its share of the peak, and doubts about its times."""

from collections.abc import Mapping
from typing import Any

from common.analysis.formulas import peaks
from common.analysis.output import tables
from common.records.run_record import Run, TimedRun

FEW_STEPS = 10  # fewer timed steps make a median doubtful
NOISY = 30  # %: so does a wider spread from p20 to p80, as a share of the median


def peak_flops(run: Run, precision: str | None = None) -> float | None:
    """FLOP/s of the run's device in its number format, or another, by the data sheet; None if that is not listed."""
    device, own = run["device"], run["precision"]
    return peaks.flops_per_second(device["name"], precision or own["compute"], own["tf32"], device.get("multiprocessors"))


def mfu(run: TimedRun) -> float | None:
    """Model FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311): FLOP/s in percent of `peak_flops`, or None."""
    peak = peak_flops(run)
    return 100 * run["flops_per_second"] / peak if peak else None


def of_measured_gemm(run: TimedRun) -> float | None:
    """FLOP/s in percent of the matrix product that the run itself measured; None if it measured none."""
    return 100 * run["flops_per_second"] / run["ceilings"]["flops_per_second"] if run["ceilings"] else None


def device(record: Mapping[str, Any]) -> str:
    """The name of the device of a run or a study, with the threads of a CPU."""
    threads = record["device"].get("threads")
    return record["device"]["name"] + (f", {tables.counted(threads, 'thread')}" if threads else "")


def last_loss(run: TimedRun) -> float:
    """The mean of the last 20 steps."""
    last = run["loss"]["all"][-20:]
    return sum(last) / len(last)


def columns(run: TimedRun) -> dict[str, object]:
    """What tables show of a run, by the heads of their columns; a table takes those that it needs."""
    training, step, memory, losses = run["training"], run["step_ms"], run["memory"], run["loss"]["all"]
    return {
        "preset": training["preset"], "device": device(run), "run": f"{training['preset']}, {device(run)}",
        "precision": run["precision"]["compute"], "B x S": f"{training['batch_size']} x {training['sequence_length']}",
        "M parameters": run["parameters"] / 1e6,
        "ms/step": step["median"], "p20 to p80": tables.spread(step), "tokens/s": run["tokens_per_second"],
        "peak MiB": memory["peak_mib"], "peak memory": f"{tables.format_number(memory['peak_mib'])} MiB ({memory['kind']})",
        "TFLOP/s": run["flops_per_second"] / 1e12, "MFU %": mfu(run), "% of measured GEMM": of_measured_gemm(run),
        "loss of a uniform guess": f"{run['loss']['uniform']:.2f}",
        "loss": f"{losses[0]:.2f} to {last_loss(run):.2f} in {tables.counted(len(losses), 'step')}",
        "last loss": f"{losses[-1]:.3f}",
    } | {f"{phase} ms": times["median"] for phase, times in run.get("phases_ms", {}).items()}  # fmt: skip


def describe(run: Mapping[str, Any], *varied: str) -> str:
    """Device, number format, PyTorch and shape of a run, or of a study that holds the same keys, in one line. It leaves out the
    keys of `training` that are `varied` between the runs that it stands for.
    """
    precision, training = run["precision"], run["training"]
    compute = precision["compute"] + " (TF32 allowed)" * precision.get("tf32", False)
    sizes = [f"{name.replace('_', ' ')} {training[name]}" for name in ("batch_size", "sequence_length") if name not in varied]
    parts = [device(run), compute, f"torch {run['environment']['torch']}", *sizes]
    return f"{', '.join(parts)}; {tables.letters(run['model'])}"


def noise(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note that names the step times (median, p20, p80) whose spread from p20 to p80 is too wide; nothing if none is."""
    spreads = {name: 100 * (step["p80"] - step["p20"]) / step["median"] for name, step in steps.items()}
    noisy = [f"{name} ({spread:.0f} %)" for name, spread in spreads.items() if round(spread, 6) > NOISY]
    return [f"Noisy: p20 to p80 spans more than {NOISY} % of the median for {', '.join(noisy)}."] if noisy else []


def doubts(runs: Mapping[str, TimedRun]) -> list[str]:
    """Notes that name runs whose step times are not to be relied on: profiled, few or noisy steps."""
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
