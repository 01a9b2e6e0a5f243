"""Where a profiled step spends its time, what limits each operator, and the most that each
optimization could gain.

Times come from one profile, and ceilings from its run, which measured a GEMM, a copy and a small
operation. Each bound follows from the two as the report explains.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from tracepage.cost.optimization_targets import SCHEMA, Step, mean_step, targets
from tracepage.errors import UsageError
from tracepage.readers import pytorch
from tracepage.readers.kernel_names import communication_or
from tracepage.records import step_profile
from tracepage.records.step_profile import Profile
from tracepage.show import run_facts, step_causes, tables
from tracepage.show.report import Report
from tracepage.views import bandwidth, profile_summary, roofline

FOLDER = Path("bottleneck_analysis")
DEFAULT = "bottlenecks_v1.md"
TOP = 15
LIMITS = {
    "compute": "compute",
    "memory": "memory",
    "launch": "too small for either (launch-bound)",
    "call": "too small for either (bound by the call)",
    "unknown": "cost not known",
    "not classed": "no ceilings",
}
# A sum of all kernels' times gets a line from so many times the time in which a kernel runs.
OVERLAP = 1.02
IDLE = "GPU idle"
ABOUT_SPANS = (
    "These are self times, so they add up. Work of the backward pass counts for the span whose "
    "forward pass made it necessary. The last row is time that no operator covers."
)
ABOUT_LAUNCHES = (
    "A delay of a few us means that the GPU waits for the host, one of milliseconds that the host "
    "is ahead. The profiler slows the host, so without it a GPU idles less."
)
ABOUT_OPERATORS = (
    "The lower bound of a call is max(FLOPs / peak, bytes / bandwidth, time of a small operation). "
    "The largest of the three binds it, and `% of ceiling` is how close the call comes. FLOPs and "
    "bytes follow from its shapes, with every tensor moved once. Above 100 %, tensors came from a "
    "cache, or a product beat the one that set the ceiling."
)
ABOUT_TARGETS = (
    "t is the time of the operators concerned and of the overhead at their calls: views and "
    "autograd nodes of that part, and the time outside operators, each spread evenly over the "
    "calls that do work. f is the floor of the fused form: for each of its calls "
    "max(FLOPs / peak, bytes / bandwidth) and the same overhead, or the time of a small operation "
    "if that is more. With p = (t - f) / step, the step gets at most 1 / (1 - p) times as fast "
    "(Amdahl's law): a bound, not a forecast. Bounds of targets that share operators do not "
    "multiply."
)
CSV_COLUMNS = """
    operator span phase input_shapes input_types calls_per_step us_per_step flops_per_call
    bytes_per_call bound_by percent_of_ceiling percent_of_step flops_per_second bytes_per_second
"""


def overlap(times: float, busy: float) -> list[str]:
    """What to say where the times of all kernels add up to more than the time in which one runs;
    else nothing.
    """
    if not 0 < OVERLAP * busy < times:
        return []
    share = f"{100 * times / busy:.0f} % of the time in which the GPU is busy"
    return [
        f"Kernels that run at the same time each count in full, so the parts add up to {share}."
    ]


def by_limit(step: Step) -> list[list[Any]]:
    """Rows of limit, us and percent of the step, the longest first: the operators by what binds
    them, and the rest.
    """
    added: dict[str, float] = defaultdict(float)
    for row in step.rows:
        added[communication_or(row.name, LIMITS[row.bound])] += row.us
    if step.outside_us:
        added[IDLE if step.on_gpu else "outside operators (Python, dispatch)"] = step.outside_us
    longest = sorted(added.items(), key=lambda item: -item[1])
    return [[name, us, 100 * us / step.us] for name, us in longest]


def limits(profile: Profile) -> list[tuple[str, str]]:
    """MFU, bandwidth, intensity and launches of the undisturbed step; shares only where a peak or a
    ceiling is known.

    Bytes and intensity are those of PyTorch's operators; a version's own kernels are not among
    them.
    """
    run = profile["run"]
    shares = bandwidth.step_limits(profile)
    rows = bandwidth.from_profile(profile)[0]
    ceilings = run["ceilings"]
    seconds = run["step_ms"]["median"] / 1e3
    facts = [
        ("step", tables.format_time(1e3 * seconds)),
        ("FLOPs", tables.format_rate(run["flops_per_second"])),
        ("MFU", run_facts.utilization(run)),
    ]
    moved = bandwidth.moved_bytes(rows)
    if moved:
        facts += bandwidth.demand(sum(row.flops or 0 for row in rows), moved, seconds, ceilings)
    if shares["launches"]:
        launches = f"{shares['launches']:,.0f}"
        if ceilings:
            time = tables.format_time(1e3 * ceilings["operation_seconds"])
            launches += f" at {time} each: {shares['launches, % of step']:.3g} % of the step"
        facts.append(("launches", launches))
    if shares["GPU idle %"] is not None:
        facts.append(("GPU idle", f"{shares['GPU idle %']:.3g} % of a profiled step"))
    return facts


def bottleneck_report(step: Step, path: Path, prefix: str = "", verdict: str = "") -> Report:
    """Verdict, time by span, longest operators and targets of the profile at `path`; it writes
    operator_timing.csv and optimization_targets.json.
    """
    profile = step.profile
    run = profile["run"]
    report = Report(f"Bottlenecks of tiny_llama_{run['version']}")
    if verdict:
        report.verdict(verdict)
    report.text(
        f"{profile_summary.conditions(profile)}.",
        f"Command `{run['command']}`, profile {path.name}.",
    )
    if profile["attention_only"]:
        report.text("Only attention was kept: shares are of attention, not of the step.")
    ceilings = run["ceilings"]
    bounds = "No measured ceilings, so nothing is classed or bounded: run with --measure-peak."
    if ceilings:
        operation = tables.format_time(ceilings["operation_seconds"] * 1e3)
        bounds = f"With {roofline.describe(ceilings)}; {operation} for a small operation."
    report.text(bounds)
    _add_spans(report, step)
    _add_operators(report, step, prefix)
    _add_targets(report, step, path, prefix)
    return report


def _add_spans(report: Report, step: Step) -> None:
    """Adds the limits of the step, and its time by span and by limit."""
    profile = step.profile
    if profile["attention_only"]:
        report.section("Time of attention")
    else:
        report.section("The step against its limits")
        report.facts(limits(profile))
        report.section("Time of the step by span")
        report.table(*profile_summary.span_rows(profile))
    unit, factor = tables.time_unit(step.us / 1e3)
    rows = [[name, us / 1e3 * factor, share] for name, us, share in by_limit(step)]
    report.table(["limit", unit, "% of step"], rows, "The same time by what limits it")
    report.text(ABOUT_SPANS)
    if not step.on_gpu:
        return
    busy = step.us - step.outside_us
    kernels_us = sum(kernel["device_us"] for kernel in profile["kernels"])
    report.text(*overlap(kernels_us / profile["profiled_steps"], busy))
    if not profile["attention_only"]:
        share = f"The GPU is busy for {100 * busy / step.us:.0f} % of the step."
        report.text(f"{profile_summary.launches(profile)} {share} {ABOUT_LAUNCHES}")


def _add_operators(report: Report, step: Step, prefix: str) -> None:
    report.section("The operators that take longest")
    report.text(ABOUT_OPERATORS)
    unit, factor = tables.time_unit(step.rows[0].us / 1e3)
    header = ["operator", "span", "phase", "shapes", "calls", unit]
    header += ["% of step", "bound by", "% of ceiling"]
    rows = [
        [
            row.name.removeprefix("aten::"),
            row.span,
            row.phase,
            row.shapes.replace(", []", ""),
            row.calls,
            row.us / 1e3 * factor,
            100 * row.us / step.us,
            row.bound,
            row.percent,
        ]
        for row in step.rows[:TOP]
    ]
    report.table(header, rows, least=["% of step", "calls", "shapes"])
    timing = (
        [*row, 100 * row.us / step.us, row.rate(row.flops), row.rate(row.bytes)]
        for row in step.rows
    )
    report.csv(f"{prefix}operator_timing", CSV_COLUMNS.split(), timing)


def _add_targets(report: Report, step: Step, path: Path, prefix: str) -> None:
    ranked = targets(step)
    content = {"schema": SCHEMA, "profile": str(path), "step_us": step.us, "targets": ranked}
    report.json(f"{prefix}optimization_targets", content)
    report.section("Targets of optimization")
    if not ranked:
        report.text("None of the parts that can be fused is left in this step.")
        return
    report.text(ABOUT_TARGETS)
    unit, factor = tables.time_unit(max(target["time_us"] for target in ranked) / 1e3)
    header = ["target", "calls", "fused", f"now t {unit}", f"floor f {unit}"]
    header += ["share p %", "gain at most"]
    rows = [
        [
            target["name"],
            target["calls"],
            target["fused_calls"],
            target["time_us"] / 1e3 * factor,
            target["floor_us"] and target["floor_us"] / 1e3 * factor,
            target["share"] and 100 * target["share"],
            target["bound"] and f"{target['bound']:.2f}x",
        ]
        for target in ranked
    ]
    report.table(header, rows)
    report.facts(
        [(target["name"], f"{target['fused_form']}. {target['note']}".strip()) for target in ranked]
    )


def find_step(profile_data: Path, version: str) -> tuple[Path, Step]:
    """A profile, or a folder's newest, and its mean step. UsageError: it is of another version
    than that whose parts the targets are.
    """
    path = step_profile.find(profile_data)
    step = mean_step(step_profile.read(path))
    profiled = step.profile["run"]["version"]
    if profiled != version:
        raise UsageError(
            f"{path} is of {profiled}: the targets are parts of {version}, which others fuse"
        )
    return path, step


def write_bottlenecks(profile_data: Path, output_report: Path, version: str) -> str:
    """Writes the report on a profile, or on a folder's newest, and beside it the files of
    `bottleneck_report`; returns the text for a terminal.

    The targets are the parts of `version`, of which the profile has to be. A bare name of a report
    goes into ./bottleneck_analysis/. The names of the other files begin with that of the report, if
    it is not DEFAULT.
    """
    path, step = find_step(profile_data, version)
    if output_report.parent == Path("."):
        output_report = FOLDER / output_report
    prefix = "" if output_report.name == DEFAULT else f"{output_report.stem}_"
    source = pytorch.with_trace(pytorch.profile_source(path, step.profile))
    verdict = step_causes.attribute(source).verdict["sentence"]
    return bottleneck_report(step, path, prefix, verdict).publish_as(
        output_report, ("md", "csv", "json"), "--output-report"
    )
