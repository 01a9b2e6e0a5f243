"""What a report says of a run or of a study: its conditions, its share of the peak, doubts about
its times; a run's summary.
"""

from collections.abc import Mapping
from typing import Any

from tracepage.cost import peaks
from tracepage.records import run_record
from tracepage.records.run_record import Run, RunRecord, TimedRun
from tracepage.show import tables
from tracepage.terminal import wrapped

FEW_STEPS = 10  # fewer timed steps make a median doubtful
NOISY = 30  # %: so does a wider spread from p20 to p80, as a share of the median
ONE_PROCESS = (
    "One process on a side does not tell how far medians differ from process to process, nor do p20 and p80 of its steps: repeat "
    "both runs, in turn, and compare the medians of processes (CONCEPTS.md#one-process-is-one-sample)."
)


def peak_flops(run: Run, precision: str | None = None) -> float | None:
    """FLOP/s of the run's device in its number format, or another, by the data sheet; None if that
    is not listed.
    """
    device = run["device"]
    own = run["precision"]
    return peaks.flops_per_second(
        device["name"], precision or own["compute"], own["tf32"], device.get("multiprocessors")
    )


def mfu(run: TimedRun) -> float | None:
    """Model FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311): FLOP/s in percent of
    `peak_flops`, or None.
    """
    peak = peak_flops(run)
    return 100 * run["flops_per_second"] / peak if peak else None


def of_measured_gemm(run: TimedRun) -> float | None:
    """FLOP/s in percent of the matrix product that the run itself measured; None if it measured
    none.
    """
    return (
        100 * run["flops_per_second"] / run["ceilings"]["flops_per_second"]
        if run["ceilings"]
        else None
    )


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
    training = run["training"]
    step = run["step_ms"]
    losses = run["loss"]["all"]
    return {
        "preset": training["preset"],
        "device": device(run),
        "run": f"{training['preset']}, {device(run)}",
        "ms/step": step["median"],
        "p20 to p80": tables.spread(step),
        "tokens/s": run["tokens_per_second"],
        "peak MiB": run["memory"]["peak_mib"],
        "TFLOP/s": run["flops_per_second"] / 1e12,
        "MFU %": mfu(run),
        "% of measured GEMM": of_measured_gemm(run),
        "loss": f"{losses[0]:.2f} to {last_loss(run):.2f} in {tables.counted(len(losses), 'step')}",
    }


def describe(run: Mapping[str, Any], *varied: str) -> str:
    """Device, number format, PyTorch and shape of a run, or of a study that holds the same keys, in
    one line. It leaves out the keys of `training` that are `varied` between the runs that it stands
    for.
    """
    precision = run["precision"]
    training = run["training"]
    compute = precision["compute"] + " (TF32 allowed)" * precision.get("tf32", False)
    sizes = [
        f"{name.replace('_', ' ')} {training[name]}"
        for name in ("batch_size", "sequence_length")
        if name not in varied
    ]
    parts = [device(run), compute, f"torch {run['environment']['torch']}", *sizes]
    return f"{', '.join(parts)}; {tables.letters(run['model'])}"


def noise(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note that names the step times (median, p20, p80) whose spread from p20 to p80 is too wide;
    nothing if none is.
    """
    spreads = {
        name: 100 * (step["p80"] - step["p20"]) / step["median"] for name, step in steps.items()
    }
    noisy = [
        f"{name} ({spread:.0f} %)" for name, spread in spreads.items() if round(spread, 6) > NOISY
    ]
    return (
        [f"Noisy: p20 to p80 spans more than {NOISY} % of the median for {', '.join(noisy)}."]
        if noisy
        else []
    )


def doubts(runs: Mapping[str, TimedRun]) -> list[str]:
    """Notes that name runs whose step times are not to be relied on: profiled, few or noisy steps."""
    slowed = [
        name
        for name, run in runs.items()
        if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"])
    ]
    notes = [
        f"All steps of {', '.join(slowed)} ran under the profiler, which slows them: raise --num-steps."
    ] * bool(slowed)
    few = min(run["step_ms"]["count"] for run in runs.values())
    if few < FEW_STEPS:
        notes.append(f"A median is of only {few} timed steps: raise --num-steps.")
    return notes + noise({name: run["step_ms"] for name, run in runs.items()})


def origin(run: Mapping[str, Any]) -> str:
    """The command of a run, its time, and how the switches of the version's own stood, where the
    record has them.
    """
    parts = [f"`{run['command']}` on {run['date']}"]
    for name, value in run.get("settings", {}).items():
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)


def summary(record: RunRecord | TimedRun) -> str:
    """The record as text for a terminal; one fact a line."""
    training = record["training"]
    settings = record.get("settings", {})
    before = record["training"].get("first_step", 1) - 1
    lines = [
        f"{record['version']}: {record['status']}, {len(record['step_ms']['all'])} of {training['num_steps'] - before} steps"
        f"{f' after step {before}' if before else ''}, "
        f"{record['precision']['compute']}, {record['device']['name']}, torch {record['environment']['torch']}",
    ]
    on = [
        name.replace("_", "-")
        for name, value in settings.items()
        if value is True or name == "torch_compile" and value
    ]
    lines += [f"  switches on  {', '.join(on) or 'none'}"] if settings else []
    if run_record.finished(record):
        step = record["step_ms"]
        loss = record["loss"]
        memory = record["memory"]
        floor = record["data"]["entropy_floor"]
        known = f", entropy of the source {floor:.3f}" if floor is not None else ""
        last = loss["all"][-20:]
        of_peak = mfu(record)
        of_gemm = of_measured_gemm(record)
        share = "not given, as this device's peak is not listed"
        if of_peak is not None and (peak := peak_flops(record)):
            share = f"{of_peak:.1f}% of {tables.format_rate(peak)} (data sheet)"
            if settings.get("fp8") and (fp8 := peak_flops(record, "fp8")):
                share += f"; {of_peak * peak / fp8:.1f}% of {tables.format_rate(fp8)} in FP8"
        if of_gemm is not None and (ceilings := record["ceilings"]):
            share += f"; {of_gemm:.1f}% of measured GEMM ({tables.format_rate(ceilings['flops_per_second'])})"
        elif of_peak is None:
            share += "; --measure-peak compares with a GEMM"
        processes = run_record.processes(record)
        together = (
            f" of {processes} processes ({training.get('parallel')}); what follows is of one"
            if processes > 1
            else ""
        )
        note = "" if len(step["all"]) > step["profiled"] else ", all under the profiler"
        own = f", {loss['own']} of them rank 0's own" if "own" in loss else ""
        noisy = noise({"this run": step})
        samples = record["tokens_per_second"] / training["sequence_length"]
        lines += [
            f"  loss         {loss['all'][0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)}{own}; "
            f"uniform guess {loss['uniform']:.3f}{known})",
            f"  step time    {tables.format_time(step['median'])} (p20 {tables.format_time(step['p20'])}, "
            f"p80 {tables.format_time(step['p80'])}, {step['count']} steps{note})",
            *(f"  note         {note}" for note in noisy),
            f"  throughput   {record['tokens_per_second']:,.0f} tokens/s, {samples:,.1f} samples (sequences)/s{together}",
            f"  peak memory  {memory['peak_mib']:,.0f} MiB ({memory['kind']}"
            + (
                f"; its pools held {memory['reserved_mib']:,.0f} MiB)"
                if "reserved_mib" in memory
                else ")"
            ),
            f"  FLOPs        {record['flops_per_step']['total'] / 1e9:.2f} GFLOP a step, "
            f"{tables.format_rate(record['flops_per_second'])}",
            f"  MFU          {share}",
        ]
    if held_out := record.get("held_out"):
        unseen = f"{tables.counted(held_out['sequences'], 'sequence')} that training does not see"
        lines.append(
            f"  held out     loss {held_out['loss']:.3f}, perplexity {held_out['perplexity']:,.1f} ({unseen})"
        )
    return "\n".join(wrapped(line, 15) for line in lines)


def phases(record: Run) -> str:
    """Times of the phases as text for a terminal; one a line."""
    return "\n".join(
        f"  {phase:<12} {figures['median']:.2f} ms (p20 {figures['p20']:.2f}, p80 {figures['p80']:.2f})"
        for phase, figures in record.get("phases_ms", {}).items()
    )
