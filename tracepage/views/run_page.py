"""The page of a run: what limits its step, where the time goes, a timeline, and the reports for
which its file has the numbers.

    profile, with its trace beside it    everything, against the ceilings that the run measured
    trace of torch.profiler              timeline, time by span, kernels, memory, critical path
    file of another profiler             kernels; a timeline where it has times, and memory traffic where it has counters
    other Chrome trace                   timeline, and the events by name

Two files have both timelines, what limits each step, and the launches that went and came.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tracepage.cost.optimization_targets import read_step
from tracepage.errors import UsageError
from tracepage.readers import (
    chrome_trace,
    graph_replays,
    kernel_names,
    load_kernels,
    pytorch,
    trace_events,
)
from tracepage.readers.chrome_trace import Trace
from tracepage.readers.kernel_table import Kernels
from tracepage.records import run_record, step_profile
from tracepage.records.step_profile import Profile, Sums
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.views import (
    bandwidth,
    bottlenecks,
    critical_path,
    launch_changes,
    launches,
    memory_timeline,
    memory_use,
    profile_summary,
    roofline,
    timeline,
)

# rows in the tables of kernels and events, and of changes
TOP = 25
CHANGES = 10
EVENTS_BY_NAME = "Events by name"  # the last section of a trace of another program
HOW_TO_READ = "Press an event for its numbers, or a name with a colour to see only its events. Ctrl and the wheel zoom."
LIMITS = "The step against its limits"
FEWER = "Capture the step as a graph, or fuse its kernels"
GRAPHS = "It launches graphs already, so see the gaps in the timeline"


def of_run(path: Path, trace: Trace | None) -> Report:
    """The page of a profile, made from `trace`, with the spans of captured kernels (None if it is
    gone).
    """
    step = read_step(path)
    profile = step.profile
    run = step.profile["run"]
    processes = run_record.processes(run)
    title = f"{run['version']} {run['training']['preset']} {run['precision']['compute']}, {run['device']['name']}"
    result = Report(f"{title}, {processes} processes" if processes > 1 else title)
    advice = GRAPHS if run.get("settings", {}).get("capture_step") else "Try `--capture-step`"
    kernels = pytorch.read_profile(path, profile)
    result.text(launches.verdict(kernels, step_profile.idle_percent(profile), advice))
    parts = bottlenecks.report(step, path)
    result.include(parts, "", "time-of-the-step-by-span", "time-of-attention")
    if trace:
        _add_timeline(
            result, timeline.of_trace(trace), f"profiled steps: {profile['profiled_steps']}"
        )
    result.include(parts, "", "the-step-against-its-limits", "targets-of-optimization")
    if profile["kernels"]:
        result.section("Kernels")
        header, rows = launches.kernel_rows(
            launches.summary(kernels), "kernel", profile["profiled_steps"]
        )
        result.table(
            header,
            rows,
            f"A mean step, {min(TOP, len(rows))} of {len(rows)}",
            code=["kernel"],
            top=TOP,
        )
        result.text(profile_summary.launches(profile))
    if run["ceilings"]:
        points = roofline.from_profile(profile)
        result.include(
            roofline.report(
                points, run["ceilings"], "The parts and the longest operators of a mean step"
            ),
            "Roofline",
        )
    result.include(parts, "", "the-operators-that-take-longest")
    result.section("Memory")
    memory_use.add_section(result, profile)
    if trace and profile["memory_peak_bytes"] is not None:
        memory_timeline.add_peak(result, trace)
    if trace:
        _add_critical_path(result, trace)
    result.section("Run")
    result.text(f"{profile_summary.conditions(profile)}. Command: `{run['command']}`")
    return result


def of_trace(path: Path, trace: Trace) -> Report:
    """The page of a trace of torch.profiler, whoever made it."""
    result = Report(path.name)
    kernels = pytorch.read_trace(path, trace)
    steps = len(trace.steps)
    sums = chrome_trace.profile_tables(trace)
    idle = step_profile.idle_percent(sums) if steps else launches.idle_percent(kernels)
    result.text(
        launches.verdict(kernels, idle, GRAPHS if trace.kernels.graph.notna().any() else FEWER)
    )
    if steps:
        _add_step(result, trace, sums, idle)
    _add_timeline(
        result, timeline.of_trace(trace), f"profiled steps: {steps}" if steps else "all events"
    )
    result.include(launches.report(kernels, TOP), "Kernels")
    if len(trace.memory):
        result.section("Memory")
        memory_timeline.add_peak(result, trace)
    _add_critical_path(result, trace)
    return result


def of_kernels(path: Path, kernels: Kernels) -> Report:
    """The page of a file of rocprofv3, rocprof-compute or ncu."""
    result = Report(path.name)
    result.text(launches.verdict(kernels, launches.idle_percent(kernels), FEWER))
    if events := timeline.of_kernels(kernels):
        _add_timeline(result, events, "all launches")
    result.include(launches.report(kernels, TOP), "Kernels")
    if (
        kernels.source in ("ncu", "rocprof-compute")
        and not isinstance(rows := bandwidth.from_counters(kernels), str)
        and rows
    ):
        result.include(bandwidth.report(bandwidth.read(path)), "Memory traffic")
    return result


def of_events(path: Path) -> Report:
    """The page of any other Chrome trace."""
    result = Report(path.name)
    (events, table, damaged) = timeline.of_events(path)
    sums = (
        table.groupby("name", sort=False)
        .duration.agg(["size", "sum"])
        .sort_values("sum", ascending=False, kind="stable")
    )
    unit, factor = tables.time_unit(sums["sum"].max() / 1e3)
    rows = [[name, calls, us / 1e3 * factor] for name, calls, us in sums.itertuples()]
    left_out = (
        f" Left out: {tables.counted(damaged, 'event')} without a name, a time or an end."
        * (damaged > 0)
    )
    result.text(f"Events: {len(table):,}; tracks: {len(events['tracks'])}.{left_out}")
    _add_timeline(result, events, "all events")
    result.section(EVENTS_BY_NAME)
    title = (
        f"The {min(TOP, len(rows))} of {len(rows)} names that take longest, with what they enclose"
    )
    result.table(["event", "calls", unit], rows, title, code=["event"], top=TOP)
    return result


def _add_timeline(result: Report, events: dict[str, Any], name: str) -> None:
    result.section("Timeline")
    result.timeline(events, name)
    left_out = (
        f" The {events['left_out']:,} shortest events are left out." if events["left_out"] else ""
    )
    result.text(HOW_TO_READ + left_out)


def _add_step(result: Report, trace: Trace, sums: Sums, idle: float | None) -> None:
    """Adds the time of a mean step by span, or by kind of work where a GPU's kernels have no spans."""
    kernels = trace.kernels[trace.kernels.step >= 0]
    whole = sum(sums["step_us"])
    if idle is None or timeline.spanned(trace):
        result.section("Time of the step by span")
        result.table(*profile_summary.span_rows(cast(Profile, {"attention_only": False, **sums})))
    else:
        us = (
            kernels.duration_us.groupby(kernels.name.map(kernel_names.kind))
            .sum()
            .sort_values(ascending=False)
        )
        shares = [*(100 * us / whole).items(), (bottlenecks.IDLE, idle)]
        ms = whole / 1e3 / len(trace.steps)
        result.section("Time of the step by kind of work")
        result.table(
            ["kind", "ms", "% of step"], [[name, share / 100 * ms, share] for name, share in shares]
        )
    result.text(*bottlenecks.overlap(kernels.duration_us.sum(), sums["device_busy_us"]))


def _add_critical_path(result: Report, trace: Trace) -> None:
    if (measured := critical_path.step(trace)) is not None:
        result.section("Critical path")
        result.table(["quantity", "of the median step"], critical_path.summary(measured).items())


def build(path: Path) -> Report:
    """The page of a file."""
    source = load_kernels.recognize(path)
    if source == "profile":
        trace = path.parent / step_profile.read(path)["trace"]
        return of_run(path, graph_replays.load(trace) if trace.exists() else None)
    if source == "pytorch-trace":
        return (
            of_trace(path, graph_replays.load(path))
            if trace_events.is_of_pytorch(path)
            else of_events(path)
        )
    return of_kernels(path, load_kernels.load(path))


def compare(paths: Sequence[Path]) -> Report:
    """The page of two files: their timelines on one scale, what limits each step, and the launches
    that went and came.
    """
    both = [build(path) for path in paths]
    sections = [section for report in both for section in report.sections]
    timelines = [
        item.content for section in sections for item in section.items if item.kind == "timeline"
    ]
    have_kernels = not any(section.title == EVENTS_BY_NAME for section in sections)
    if len(timelines) < 2 and not have_kernels:
        raise UsageError(
            f"{paths[0]} and {paths[1]} have nothing in common: give two profiles or traces"
        )
    result = Report(" and ".join(dict.fromkeys(report.title for report in both)))
    result.section("Runs")
    result.facts(
        [
            (str(i), f"{path}. {both[i - 1].sections[0].items[0].content}")
            for i, path in enumerate(paths, 1)
        ]
    )
    if timelines:
        result.section("Timeline")
        for number, (name, events) in enumerate(timelines, 1):
            result.timeline(events, f"{number}: {name}")
        result.text(HOW_TO_READ)
    facts = [dict(section.items[0].content) for section in sections if section.title == LIMITS]
    if len(facts) == 2 and facts[0] != facts[1]:
        result.section(LIMITS)
        rows = [[label, facts[0].get(label), facts[1].get(label)] for label in facts[0] | facts[1]]
        result.table(["of a step", "1", "2"], rows)
        result.text(run_facts.ONE_PROCESS)
    if have_kernels:
        result.section("Launches")
        launch_changes.add_section(
            result, launch_changes.compare(paths[0], paths[1], may_differ=True), "changes", CHANGES
        )
    return result
