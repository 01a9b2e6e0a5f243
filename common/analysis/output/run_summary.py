"""The summary that a run prints at its end, from its record."""

from common.analysis.output import run_facts, tables
from common.records import run_record
from common.records.run_record import Run, RunRecord, TimedRun
from common.terminal import wrapped


def summary(record: RunRecord | TimedRun) -> str:
    """The record as text for a terminal; one fact a line."""
    training, settings, before = record["training"], record.get("settings", {}), record["training"].get("first_step", 1) - 1
    lines = [
        f"{record['version']}: {record['status']}, {len(record['step_ms']['all'])} of {training['num_steps'] - before} steps"
        f"{f' after step {before}' if before else ''}, "
        f"{record['precision']['compute']}, {record['device']['name']}, torch {record['environment']['torch']}",
    ]
    on = [name.replace("_", "-") for name, value in settings.items() if value is True or name == "torch_compile" and value]
    lines += [f"  switches on  {', '.join(on) or 'none'}"] if settings else []
    if run_record.finished(record):
        step, loss, memory, floor = record["step_ms"], record["loss"], record["memory"], record["data"]["entropy_floor"]
        known = f", entropy of the source {floor:.3f}" if floor is not None else ""
        last = loss["all"][-20:]
        mfu, of_gemm = run_facts.mfu(record), run_facts.of_measured_gemm(record)
        share = "not given, as this device's peak is not listed"
        if mfu is not None and (peak := run_facts.peak_flops(record)):
            share = f"{mfu:.1f}% of {tables.format_rate(peak)} (data sheet)"
            if settings.get("fp8") and (fp8 := run_facts.peak_flops(record, "fp8")):
                share += f"; {mfu * peak / fp8:.1f}% of {tables.format_rate(fp8)} in FP8"
        if of_gemm is not None and (ceilings := record["ceilings"]):
            share += f"; {of_gemm:.1f}% of measured GEMM ({tables.format_rate(ceilings['flops_per_second'])})"
        elif mfu is None:
            share += "; --measure-peak compares with a GEMM"
        processes = run_record.processes(record)
        together = f" of {processes} processes ({training.get('parallel')}); what follows is of one" if processes > 1 else ""
        note = "" if len(step["all"]) > step["profiled"] else ", all under the profiler"
        own = f", {loss['own']} of them rank 0's own" if "own" in loss else ""
        noise = run_facts.noise({"this run": step})
        lines += [
            f"  loss         {loss['all'][0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)}{own}; "
            f"uniform guess {loss['uniform']:.3f}{known})",
            f"  step time    {tables.format_time(step['median'])} (p20 {tables.format_time(step['p20'])}, "
            f"p80 {tables.format_time(step['p80'])}, {step['count']} steps{note})",
            *(f"  note         {note}" for note in noise),
            f"  throughput   {record['tokens_per_second']:,.0f} tokens/s{together}",
            f"  peak memory  {memory['peak_mib']:,.0f} MiB ({memory['kind']}"
            + (f"; its pools held {memory['reserved_mib']:,.0f} MiB)" if "reserved_mib" in memory else ")"),
            f"  FLOPs        {record['flops_per_step']['total'] / 1e9:.2f} GFLOP a step, "
            f"{tables.format_rate(record['flops_per_second'])}",
            f"  MFU          {share}",
        ]
    return "\n".join(wrapped(line, 15) for line in lines)


def phases(record: Run) -> str:
    """Times of the phases as text for a terminal; one a line."""
    return "\n".join(
        f"  {phase:<12} {figures['median']:.2f} ms (p20 {figures['p20']:.2f}, p80 {figures['p80']:.2f})"
        for phase, figures in record.get("phases_ms", {}).items()
    )
