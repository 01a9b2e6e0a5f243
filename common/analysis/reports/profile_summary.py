"""A profile (schema tiny-llama-profile/1, see common.training.profiler) as text, Markdown, tables and a figure.

`--profile-operators` prints the table of operators, `run_pytorch_profiler.py --analyze-existing` the whole text, TensorBoard
shows the operators and the figure. `--generate-report` writes the Markdown.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.analysis.output import tables
from common.analysis.profiles import kernel_names, step_profile
from common.files import writable_folder, write_text

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
    heading, header, body = _operators(profile, sort_by)
    return f"{heading}\n{tables.text(header, body)}"


def _operators(profile: dict[str, Any], sort_by: str | None) -> tuple[str, list[str], list[list[Any]]]:
    """Heading, header and the first rows."""
    header, body, column = operator_rows(profile, sort_by)
    heading = f"operators ({_kept(profile)}per step, by {column}, {min(ROWS, len(body))} of {len(body)})"
    return heading, header, body[:ROWS]


def _kept(profile: dict[str, Any]) -> str:
    return "attention, " if profile["attention_only"] else ""


def span_rows(profile: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of where a step's time goes, in ms: the spans, and what none of them covers."""
    on_gpu, wall = bool(profile["kernels"]), sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
    body = [
        [span, phases.get("forward", 0.0), phases.get("backward", 0.0), sum(phases.values()), 100 * sum(phases.values()) / wall]
        for span, phases in step_profile.span_milliseconds(profile).items()
    ]
    covered = profile["device_busy_us"] / profile["profiled_steps"] / 1e3 if on_gpu else sum(row[3] for row in body)
    if not profile["attention_only"]:
        rest = wall - covered
        body.append(["idle GPU" if on_gpu else "outside operators (Python)", None, None, rest, 100 * rest / wall])
    return ["span", "forward", "backward", "total", "% of step"], body


def kernel_rows(profile: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of the kernels of a GPU per step, added up over spans and phases, the longest first."""
    calls, us = Counter(), Counter()
    for kernel in profile["kernels"]:
        calls[kernel["name"]] += kernel["calls"]
        us[kernel["name"]] += kernel["device_us"]
    steps, whole = profile["profiled_steps"], us.total() or 1
    body = [
        [kernel_names.short_name(name), calls[name] / steps, total / steps, total / calls[name], 100 * total / whole]
        for name, total in us.most_common()
    ]
    return ["kernel", "launches", "us", "us each", "share %"], body


def conditions(profile: dict[str, Any]) -> str:
    """What ran on what, and how long a step took with and without the profiler."""
    run, steps, timed = profile["run"], profile["profiled_steps"], profile["run"]["step_ms"]
    clean = f"unprofiled: median {timed['median']:.2f} ms, {timed['count']} steps"
    wall = sum(profile["step_us"]) / steps / 1e3
    return (
        f"{run['version']}, {run['device']['name']}, {run['precision']['compute']}, batch {run['training']['batch_size']}, "
        f"sequence {run['training']['sequence_length']}: {steps} profiled steps of {wall:.2f} ms "
        f"({clean if len(timed['all']) > timed['profiled'] else 'no other steps'})"
    )


def launches(profile: dict[str, Any]) -> str:
    """How often a step launches, and how long that waits."""
    launch = profile["launch"]
    count = launch["count"] / profile["profiled_steps"]
    what = "kernels, copies and fills a step" + (" (the whole step)" if profile["attention_only"] else "")
    return f"{count:.0f} {what}, each {launch['mean_delay_us']:.1f} us after its launch call (mean)"


def _where(profile: dict[str, Any]) -> str:
    return f"time {'on the GPU' if profile['kernels'] else 'in operators, on the CPU'}, ms per step"


def text(profile: dict[str, Any], sort_by: str | None = None) -> str:
    """What was profiled, where a step's time goes by span and phase, and the table of operators."""
    lines = [conditions(profile), _where(profile), tables.text(*span_rows(profile))]
    lines += [launches(profile)] if profile["kernels"] else []
    return "\n".join([*lines, "", operators(profile, sort_by)])


def markdown(path: Path, profile: dict[str, Any], sort_by: str | None = None) -> str:
    """A section of a report: the same as `text`, and on a GPU the kernels; then the files that were written with `path`."""
    heading, *operator_table = _operators(profile, sort_by)
    parts = [f"## {path.name}", f"{conditions(profile)}, by `{profile['run']['command']}`."]
    parts += [f"### {_sentence(_where(profile))}", tables.markdown(*span_rows(profile))]
    if profile["kernels"]:
        header, body = kernel_rows(profile)
        idle = 100 * (1 - profile["device_busy_us"] / sum(profile["step_us"]))
        parts += [
            f"### Kernels ({_kept(profile)}per step, by us, {min(ROWS, len(body))} of {len(body)})",
            f"{launches(profile)}. The GPU is idle {idle:.1f} % of the step; less without the profiler, which slows the host.",
            tables.markdown(header, [[f"`{name}`", *figures] for name, *figures in body[:ROWS]]),
        ]
    parts += [f"### {_sentence(heading)}", tables.markdown(*operator_table), "### Files", tables.markdown(*_files(path, profile))]
    return "\n\n".join(part.strip() for part in parts)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _files(path: Path, profile: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the files that a profiled run wrote beside its profile and that are still there."""
    contents = {
        path.name: "this profile, for the analysis scripts",
        profile["trace"]: "Chrome trace, for https://ui.perfetto.dev",
        f"run_{path.stem.removeprefix('profile_')}": "event files, for TensorBoard",
        "memory_timeline.html": "memory over time, of the last run with --profile-memory",
    }
    return ["file", "what it is"], [[name, what] for name, what in contents.items() if (path.parent / name).exists()]


def write(paths: Iterable[Path], sort_by: str | None = None) -> list[Path]:
    """Writes report.md into the folder of each profile, with a section for each that is there. Returns the reports.

    Raises:
        UsageError: a file is no profile, or its folder cannot be written to.
    """
    reports: dict[Path, list[str]] = {}
    for path in paths:
        reports.setdefault(path.parent, ["# Profiles"]).append(markdown(path, step_profile.read(path), sort_by))
    for folder, parts in reports.items():
        write_text(writable_folder(folder, "--generate-report") / "report.md", "\n\n".join(parts) + "\n")
    return [folder / "report.md" for folder in reports]


def span_figure(profile: dict[str, Any]):
    """A matplotlib Figure: self time per step by span, forward and backward apart."""
    from matplotlib.figure import Figure

    spans = step_profile.span_milliseconds(profile)
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
