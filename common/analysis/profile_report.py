"""A profile (schema tiny-llama-profile/1, see common.profiling) as text, tables and a figure.

`--profile-operators` prints the table of operators, `run_pytorch_profiler.py` the whole text, TensorBoard shows both.
"""

from pathlib import Path
from typing import Any

from common.analysis import tables
from common.errors import UsageError
from common.files import read_json

SCHEMA = "tiny-llama-profile/1"
ROWS = 20
# torch.profiler's names for sort keys -> our columns; `cuda_` is today's `device_`. On a CPU device time is CPU time.
COLUMNS = {
    "cpu_time_total": "cpu_us",
    "self_cpu_time_total": "self_cpu_us",
    "cuda_time_total": "device_us",
    "self_cuda_time_total": "self_device_us",
    "device_time_total": "device_us",
    "self_device_time_total": "self_device_us",
    "cpu_memory_usage": "allocated_bytes",
    "cuda_memory_usage": "allocated_bytes",
    "device_memory_usage": "allocated_bytes",
    "count": "calls",
}


def read(path: Path) -> dict[str, Any]:
    """A profile_*.json.

    Raises:
        UsageError: the file is missing, damaged, not a profile, or holds no finished step.
    """
    profile = read_json(path, SCHEMA)
    if not profile["profiled_steps"] or not profile["operators"]:
        raise UsageError(f"{path} holds no profiled step: its run was stopped early; profile again")
    return profile


def operator_rows(profile: dict[str, Any], sort_by: str | None = None) -> tuple[list[str], list[list[Any]], str]:
    """The operators of a profile, added up over spans, phases and shapes.

    Args:
        profile: schema tiny-llama-profile/1.
        sort_by: a key of COLUMNS; None is the self time on the device that ran the work.

    Returns:
        Header, rows (largest first, times in ms and counts per step, memory in MiB per step), and the column that
        they are sorted by.
    """
    on_gpu = bool(profile["kernels"])
    column = COLUMNS[sort_by or ("self_device_time_total" if on_gpu else "self_cpu_time_total")]
    if not on_gpu:
        column = column.replace("device", "cpu")
    added: dict[str, dict[str, float]] = {}
    for operator in profile["operators"]:
        total = added.setdefault(operator["name"], dict.fromkeys({*COLUMNS.values()}, 0))
        for key in total:
            total[key] += operator[key]
    steps = profile["profiled_steps"]
    times = ["self_cpu_us", "cpu_us"] + (["self_device_us", "device_us"] if on_gpu else [])
    own = "self_device_us" if on_gpu else "self_cpu_us"
    whole = sum(total[own] for total in added.values()) or 1
    ranked = sorted(added.items(), key=lambda item: item[1][column], reverse=True)
    header = ["operator", "calls", *(f"{key.removesuffix('_us')} ms" for key in times), "share %", "MiB allocated"]
    body = [
        [name, total["calls"] / steps, *(total[key] / steps / 1e3 for key in times), 100 * total[own] / whole,
         total["allocated_bytes"] / steps / 2**20]
        for name, total in ranked
    ]  # fmt: skip
    if profile["memory_peak_bytes"] is None:
        header, body = header[:-1], [row[:-1] for row in body]
    return header, body, column


def operators(profile: dict[str, Any], sort_by: str | None = None) -> str:
    """The first rows, for a terminal, with a heading that says what they are and how they are sorted."""
    header, body, column = operator_rows(profile, sort_by)
    what = "attention, " if profile["attention_only"] else ""
    heading = f"operators ({what}per step, by {column}, {min(ROWS, len(body))} of {len(body)})"
    return f"{heading}\n{tables.text(header, body[:ROWS])}"


def span_milliseconds(profile: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Self time per step in ms, by span and within it by phase (forward, backward, optimizer, other); largest span first."""
    own = "self_device_us" if profile["kernels"] else "self_cpu_us"
    added: dict[str, dict[str, float]] = {}
    for operator in profile["operators"]:
        phases = added.setdefault(operator["span"], {})
        milliseconds = operator[own] / profile["profiled_steps"] / 1e3
        phases[operator["phase"]] = phases.get(operator["phase"], 0.0) + milliseconds
    return dict(sorted(added.items(), key=lambda item: -sum(item[1].values())))


def text(profile: dict[str, Any], sort_by: str | None = None) -> str:
    """What was profiled, where a step's time goes by span and phase, and the table of operators."""
    run, steps = profile["run"], profile["profiled_steps"]
    wall = sum(profile["step_us"]) / steps / 1e3
    spans = span_milliseconds(profile)
    body = [
        [span, phases.get("forward", 0.0), phases.get("backward", 0.0), sum(phases.values()), 100 * sum(phases.values()) / wall]
        for span, phases in spans.items()
    ]
    where = "on the GPU" if profile["kernels"] else "in operators, on the CPU"
    rest = wall - (profile["device_busy_us"] / steps / 1e3 if profile["kernels"] else sum(row[3] for row in body))
    if not profile["attention_only"]:
        body.append(["idle GPU" if profile["kernels"] else "outside operators (Python)", None, None, rest, 100 * rest / wall])
    lines = [
        f"{run['version']}, {run['device']['name']}, {run['precision']['compute']}, batch {run['training']['batch_size']}, "
        f"sequence {run['training']['sequence_length']}: {steps} profiled steps of {wall:.2f} ms "
        f"(unprofiled: median {run['step_ms']['median']:.2f} ms, {run['step_ms']['count']} steps)",
        f"time {where}, ms per step",
        tables.text(["span", "forward", "backward", "total", "% of step"], body),
    ]
    if profile["kernels"]:
        launch = profile["launch"]
        lines.append(
            f"{launch['count'] / steps:.0f} kernels a step, each {launch['mean_delay_us']:.1f} us after its launch call (mean)"
        )
    return "\n".join([*lines, "", operators(profile, sort_by)])


def span_figure(profile: dict[str, Any]):
    """A matplotlib Figure: self time per step by span, forward and backward apart."""
    from matplotlib.figure import Figure

    spans = span_milliseconds(profile)
    figure = Figure(figsize=(8, 0.5 * len(spans) + 1.2), layout="constrained")
    axes, left = figure.add_subplot(), dict.fromkeys(spans, 0.0)
    for phase in ("forward", "backward", "optimizer", "other"):
        widths = [phases.get(phase, 0.0) for phases in spans.values()]
        if any(widths):
            axes.barh(list(spans), widths, left=list(left.values()), label=phase)
        left = {span: left[span] + width for span, width in zip(spans, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, " + ("GPU kernels" if profile["kernels"] else "CPU, self time of operators"))
    axes.legend(loc="lower right")
    return figure
