"""Summaries of profiles: time by span, kernels and operators of a mean step.

`run_pytorch_profiler.py --analyze-existing` prints the report and `--generate-report` writes it as
report.md. The flag `--profile-operators` prints the table of operators.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tracepage.readers import pytorch
from tracepage.records import step_profile
from tracepage.records.step_profile import Profile, Sums
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.views import memory_use
from tracepage.views.launches import kernel_rows, summary

import pandas

ROWS = 20  # In the tables of kernels and operators.
# torch.profiler's names for sort keys -> keys of an operator; `cuda_` is today's `device_`. On a
# CPU device time is CPU time.
SORT_KEYS = {
    "cpu_time_total": "cpu_us",
    "self_cpu_time_total": "self_cpu_us",
    "device_time_total": "device_us",
    "self_device_time_total": "self_device_us",
    "cpu_memory_usage": "allocated_bytes",
    "device_memory_usage": "allocated_bytes",
    "count": "calls",
}
LABELS = {
    "self_cpu_us": "self CPU",
    "cpu_us": "CPU",
    "self_device_us": "self GPU",
    "device_us": "GPU",
    "allocated_bytes": "MiB allocated",
    "calls": "calls",
}
FLOPS_NOTE = (
    "GFLOP is what torch.profiler counts: matrix products, convolutions, additions and "
    "multiplications. Fused attention, Triton kernels and all else count as 0, and so does a step "
    "that is replayed as a graph. The FLOPs of the model are in the record."
)


def summary_report(paths: Iterable[Path], sort_by: str | None = None) -> Report:
    """A report with a section for each profile; `sort_by` is a key of SORT_KEYS for the operators,
    or None for the self time on the device that ran the work.
    """
    report = Report("Profiles")
    for path in paths:
        add_section(report, path, step_profile.read(path), sort_by)
    return report


def write_summaries(paths: Sequence[Path], sort_by: str | None = None) -> list[Path]:
    """Writes report.md into the folder of each profile; it has a section for each of `paths` in
    that folder.
    """
    written = []
    for folder, members in itertools.groupby(sorted(paths), key=lambda path: path.parent):
        report = summary_report(members, sort_by)
        written += report.write(folder, "report", ("md",), "--generate-report")
    return written


def operator_report(profile: Profile, sort_by: str | None = None) -> Report:
    """The table of operators alone."""
    report = Report("Operators")
    _add_operators(report, profile, sort_by)
    return report


def add_section(report: Report, path: Path, profile: Profile, sort_by: str | None = None) -> None:
    """Adds conditions, time by span, kernels of a GPU, memory, and operators."""
    report.section(path.name)
    report.text(f"{conditions(profile)}. Command: `{profile['run']['command']}`")
    where = "on the GPU" if profile["kernels"] else "in operators on the CPU"
    spans = span_rows(profile, profile["attention_only"])
    report.table(*spans, title=f"Time {where} in a mean step")
    if profile["kernels"]:
        kernels = summary(pytorch.profile_source(path, profile))
        table = kernel_rows(kernels, "kernel", profile["profiled_steps"])
        report.table(*table, _title("Kernels", profile), code=["kernel"], top=ROWS)
        idle = f"{step_profile.idle_percent(profile):.1f} % of the step"
        report.text(
            f"{launches(profile)} The GPU is idle {idle}. "
            "It idles less without the profiler, which slows the host."
        )
    memory_use.add_section(report, profile)
    _add_operators(report, profile, sort_by)


def _add_operators(report: Report, profile: Profile, sort_by: str | None) -> None:
    header, rows, column = operator_rows(profile, sort_by)
    title = f"{_title('Operators', profile)}, sorted by {LABELS[column]}"
    # No memory is 3.81e-06 MiB.
    table = pandas.DataFrame(rows, columns=header).round({LABELS["allocated_bytes"]: 4})
    report.table(*tables.of_frame(table), title, top=ROWS)
    if "operator_flops" in profile:
        report.text(FLOPS_NOTE)


def _title(label: str, profile: Profile) -> str:
    part = " of attention" if profile["attention_only"] else ""
    return f"{label}{part} in a mean step"


def operator_rows(
    profile: Profile, sort_by: str | None = None
) -> tuple[list[str], list[list[Any]], str]:
    """The operators of a profile, added up over spans, phases and shapes: header, rows (largest
    first, per step), and the key of an operator by which they are sorted.
    """
    on_gpu = bool(profile["kernels"])
    steps = profile["profiled_steps"]
    column = SORT_KEYS[(sort_by or "self_device_time_total").replace("cuda", "device")]
    times = ["self_cpu_us", "cpu_us"]
    if on_gpu:
        times += ["self_device_us", "device_us"]
    else:
        column = column.replace("device", "cpu")
    frame = pandas.DataFrame(profile["operators"])
    added = frame.groupby("name", sort=False)[list(LABELS)].sum() / steps
    added = added.sort_values(column, ascending=False, kind="stable")
    unit, factor = tables.time_unit(added[times].to_numpy().max() / 1e3)
    self_time = added["self_device_us" if on_gpu else "self_cpu_us"]
    table = pandas.DataFrame({"operator": added.index, "calls": added.calls})
    for key in times:
        table[f"{LABELS[key]} {unit}"] = added[key] / 1e3 * factor
    table["share %"] = 100 * self_time / (self_time.sum() or 1)
    if profile["memory_peak_bytes"] is not None:
        table[LABELS["allocated_bytes"]] = added.allocated_bytes / 2**20
    if "operator_flops" in profile:
        flops = profile["operator_flops"]
        table["GFLOP"] = [flops.get(name, 0) / steps / 1e9 for name in added.index]
    return *tables.of_frame(table), column


def span_rows(profile: Sums, attention_only: bool = False) -> tables.Table:
    """Header and rows of the time of a mean step by span, and the time outside all operators (on a
    GPU: when it is idle).
    """
    steps = profile["profiled_steps"]
    wall = sum(profile["step_us"]) / steps / 1e3
    unit, factor = tables.time_unit(wall)
    rows: list[list[Any]] = []
    covered = 0.0
    for span, phases in step_profile.span_milliseconds(profile).items():
        total = sum(phases.values())
        covered += total
        forward = phases.get("forward", 0.0) * factor
        backward = phases.get("backward", 0.0) * factor
        rows.append([span, forward, backward, total * factor, 100 * total / wall])
    outside = "outside operators (Python)"
    if profile["kernels"]:
        covered = profile["device_busy_us"] / steps / 1e3
        outside = "idle GPU"
    if not attention_only:
        rest = wall - covered
        rows.append([outside, None, None, rest * factor, 100 * rest / wall])
    return ["span", f"forward {unit}", f"backward {unit}", f"total {unit}", "% of step"], rows


def conditions(profile: Profile) -> str:
    """Version and conditions of a profiled run, and the time of a step with and without the
    profiler.
    """
    run = profile["run"]
    steps = profile["profiled_steps"]
    timed = run["step_ms"]
    undisturbed = "no other steps"
    if len(timed["all"]) > timed["profiled"]:
        median = tables.format_time(timed["median"])
        undisturbed = f"unprofiled: median {median}, {tables.counted(timed['count'], 'step')}"
    return (
        f"{run['version']}, {run_facts.describe(run)}; {tables.counted(steps, 'profiled step')} of "
        f"{tables.format_time(sum(profile['step_us']) / steps / 1e3)} ({undisturbed})"
    )


def launches(profile: Profile) -> str:
    """The number of launches in a step, and the mean delay from the launching call to the start."""
    launch = profile["launch"]
    whole = " (the whole step)" if profile["attention_only"] else ""
    delay = tables.format_time(launch["mean_delay_us"] / 1e3)
    count = launch["count"] / profile["profiled_steps"]
    return (
        f"A step launches {count:,.0f} kernels, copies and fills{whole}. "
        f"Each starts {delay} after its launch call on average."
    )
