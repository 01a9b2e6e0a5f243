"""The words of a report about a run or a study: its conditions, its share of the peak, doubts about
its times; a run's summary.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tracepage.cost import peaks
from tracepage.records import run_record
from tracepage.records.run_record import AnyRun, RunRecord, TimedRun
from tracepage.show import tables
from tracepage.terminal import wrapped

FEW_STEPS = 10  # fewer timed steps make a median doubtful
NOISY = 30  # %: so does a wider spread from p20 to p80, as a share of the median
ONE_PROCESS = (
    "One process on a side does not tell how far medians differ from process to process, nor do "
    "p20 and p80 of its steps: repeat both runs, in turn, and compare the medians of processes "
    "(CONCEPTS.md#one-process-is-one-sample)."
)


def peak_flops(run: AnyRun, precision: str | None = None) -> float | None:
    """FLOP/s of the run's device in its number format, or another, by the data sheet; None if that
    is not listed, or if products in FP8 and in the run's format have one each.
    """
    if products_in_fp8(run) and not precision:
        return None
    device = run["device"]
    number_format = run["precision"]
    compute = precision or number_format["compute"]
    return peaks.flops_per_second(
        device["name"], compute, number_format["tf32"], device.get("multiprocessors")
    )


def products_in_fp8(run: AnyRun) -> bool:
    """Whether some of its products are in FP8; the record does not know their share."""
    return bool(run.get("settings", {}).get("fp8"))


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
    if not run["ceilings"]:
        return None
    return 100 * run["flops_per_second"] / run["ceilings"]["flops_per_second"]


def device(record: Mapping[str, Any]) -> str:
    """The name of the device of a run or a study, with the threads of a CPU."""
    name = record["device"]["name"]
    threads = record["device"].get("threads")
    return f"{name}, {tables.counted(threads, 'thread')}" if threads else name


def host(studies: Iterable[Mapping[str, Any]]) -> str:
    """What a call of PyTorch costs the host of benchmarks, the median of their processes; empty
    where none recorded it.
    """
    costs = [
        run["host_us"]
        for study in studies
        for cell in study.get("cells", [])
        for run in cell.get("runs", [])
        if run.get("host_us")
    ]
    if not costs:
        return ""
    launch = tables.format_number(median(cost["launch"] for cost in costs))
    mm = tables.format_number(median(cost["mm"] for cost in costs))
    return f"host, median of all runs: {launch} us a launch, {mm} us an mm"


def last_loss(run: TimedRun) -> float:
    """The mean of the last 20 steps."""
    last = run["loss"]["all"][-20:]
    return sum(last) / len(last)


def columns(run: TimedRun) -> dict[str, object]:
    """Cells that show a run, by the heads of their columns; a table takes those that it needs."""
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
    compute = run["precision"]["compute"]
    if run["precision"].get("tf32"):
        compute += " (TF32 allowed)"
    parts = [device(run), compute, *_mode(run), f"torch {run['environment']['torch']}"]
    for name in ("batch_size", "sequence_length"):
        if name not in varied:
            parts.append(f"{name.replace('_', ' ')} {run['training'][name]}")
    return f"{', '.join(parts)}; {tables.letters(run['model'])}"


def _mode(run: Mapping[str, Any]) -> list[str]:
    """Whether the kernels were deterministic; nothing where the file does not say it."""
    words = {True: ["deterministic"], False: ["not deterministic"]}
    return words.get(run.get("deterministic"), [])  # type: ignore[arg-type]


def noise(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note that names the step times (median, p20, p80) whose spread from p20 to p80 is too wide;
    nothing if none is.
    """
    noisy = []
    for name, step in steps.items():
        percent = 100 * (step["p80"] - step["p20"]) / step["median"]
        if round(percent, 6) > NOISY:
            noisy.append(f"{name} ({percent:.0f} %)")
    if not noisy:
        return []
    return [f"Noisy: p20 to p80 spans more than {NOISY} % of the median for {', '.join(noisy)}."]


def doubts(runs: Mapping[str, TimedRun]) -> list[str]:
    """Notes that name runs of unreliable step times: profiled, few or noisy steps."""
    notes = []
    slowed = ", ".join(name for name, run in runs.items() if run_record.all_profiled(run))
    if slowed:
        notes.append(
            f"All steps of {slowed} ran under the profiler, which slows them: raise --num-steps."
        )
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
        if isinstance(value, bool):
            value = "on" if value else "off"
        parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def summary(record: RunRecord | TimedRun) -> str:
    """The record as text for a terminal; one fact a line."""
    training = record["training"]
    before = training.get("first_step", 1) - 1
    steps = f"{len(record['step_ms']['all'])} of {training['num_steps'] - before} steps"
    if before:
        steps += f" after step {before}"
    conditions = [record["precision"]["compute"], *_mode(record), record["device"]["name"]]
    conditions.append(f"torch {record['environment']['torch']}")
    lines = [f"{record['version']}: {record['status']}, {steps}, {', '.join(conditions)}"]
    settings = record.get("settings", {})
    if settings:
        switches = [
            name.replace("_", "-")
            for name, value in settings.items()
            if value is True or (name == "torch_compile" and value)
        ]
        lines.append(f"  switches on  {', '.join(switches) or 'none'}")
    if run_record.finished(record):
        lines += _measured(record)
    fp8 = record.get("fp8")
    if fp8:
        steps = tables.counted(fp8["saturated_steps"], "step")
        kinds = f"x {fp8['x']}, weight {fp8['weight']}, gradient {fp8['gradient']}"
        lines.append(f"  FP8          {steps} in which a tensor was clipped ({kinds})")
    held_out = record.get("held_out")
    if held_out:
        unseen = f"{tables.counted(held_out['sequences'], 'sequence')} that training does not see"
        lines.append(
            f"  held out     loss {held_out['loss']:.3f}, "
            f"perplexity {held_out['perplexity']:,.1f} ({unseen})"
        )
    return "\n".join(wrapped(line, 15) for line in lines)


def _measured(run: TimedRun) -> list[str]:
    """Lines of loss, times, memory and FLOPs."""
    step = run["step_ms"]
    loss = run["loss"]
    memory = run["memory"]
    mean_of = f"the last {len(loss['all'][-20:])}"
    if "own" in loss:
        mean_of += f", {loss['own']} of them rank 0's own"
    floor = run["data"]["entropy_floor"]
    known = f", entropy of the source {floor:.3f}" if floor is not None else ""
    count = f"{step['count']} steps"
    if run_record.all_profiled(run):
        count += ", all under the profiler"
    rate = run["tokens_per_second"]
    samples = rate / run["training"]["sequence_length"]
    throughput = f"{rate:,.0f} tokens/s, {samples:,.1f} samples (sequences)/s"
    processes = run_record.processes(run)
    if processes > 1:
        form = run["training"].get("parallel")
        throughput += f" of {processes} processes ({form}); what follows is of one"
    pools = ""
    if "reserved_mib" in memory:
        pools = f"; its pools held {memory['reserved_mib']:,.0f} MiB"
    return [
        f"  loss         {loss['all'][0]:.3f} -> {last_loss(run):.3f} (mean of {mean_of}; "
        f"uniform guess {loss['uniform']:.3f}{known})",
        f"  step time    {tables.format_time(step['median'])} "
        f"(p20 {tables.format_time(step['p20'])}, p80 {tables.format_time(step['p80'])}, {count})",
        *(f"  note         {note}" for note in noise({"this run": step})),
        f"  throughput   {throughput}",
        f"  peak memory  {memory['peak_mib']:,.0f} MiB ({memory['kind']}{pools})",
        f"  FLOPs        {run['flops_per_step']['total'] / 1e9:.2f} GFLOP a step, "
        f"{tables.format_rate(run['flops_per_second'])}",
        f"  MFU          {utilization(run)}",
    ]


def utilization(run: TimedRun) -> str:
    """Shares of the data sheet's peak and of the product that the run measured."""
    rate = run["flops_per_second"]
    peak = peak_flops(run)
    fp8 = peak_flops(run, "fp8")
    text = "not given, as this device's peak is not listed"
    if peak:
        text = f"{100 * rate / peak:.1f}% of {tables.format_rate(peak)} (data sheet)"
    elif products_in_fp8(run) and fp8:
        text = (
            "not given, as products in two formats have two peaks; "
            f"{100 * rate / fp8:.1f}% of {tables.format_rate(fp8)} in FP8 (data sheet)"
        )
    if run["ceilings"]:
        gemm = tables.format_rate(run["ceilings"]["flops_per_second"])
        text += f"; {of_measured_gemm(run):.1f}% of measured GEMM ({gemm})"
    elif not peak:
        text += "; --measure-peak compares with a GEMM"
    return text


def phases(record: AnyRun) -> str:
    """Times of the phases as text for a terminal; one a line."""
    return "\n".join(
        f"  {phase:<12} {times['median']:.2f} ms (p20 {times['p20']:.2f}, p80 {times['p80']:.2f})"
        for phase, times in record.get("phases_ms", {}).items()
    )
