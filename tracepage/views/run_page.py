"""The page of a run: what limits its step, where the time goes, a timeline, and the reports for
which its file has the numbers.

    profile, with its trace beside it    everything, against the ceilings that the run measured
    trace of torch.profiler              timeline, time by span, kernels, memory, critical path
    file of another profiler             kernels; a timeline where it has times, and memory traffic
                                         where it has counters
    other Chrome trace                   timeline, and the events by name

Two files have both timelines, what limits each step, and the launches that went and came.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracepage.cost.optimization_targets import mean_step
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, graph_replays, kernel_names, load_kernels
from tracepage.readers.source import OTHER_TRACE, Source
from tracepage.readers.trace import Trace
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

TOP = 25  # Rows in the tables of kernels and events.
CHANGES = 10  # Rows in the table of changes.
HOW_TO_READ = (
    "Press an event for its numbers, or a name with a colour to see only its events. "
    "Ctrl and the wheel zoom."
)
LIMITS = "The step against its limits"
FEWER = "Capture the step as a graph, or fuse its kernels"
GRAPHS = "It launches graphs already, so see the gaps in the timeline"


def load_page_source(path: Path) -> Source:
    """A file that has a page; a profile with its trace, if that lies beside it."""
    source = load_kernels.load(path, any_trace=True)
    if source.profile is None:
        return source
    trace = path.parent / source.profile["trace"]
    return replace(source, trace=graph_replays.load(trace)) if trace.exists() else source


def make_page(sources: Sequence[Source]) -> Report:
    """The page of a file, or of two."""
    pages = [_page_of(source) for source in sources]
    return _page_of_two(sources, pages) if pages[1:] else pages[0]


def _page_of(source: Source) -> Report:
    if source.profile:
        return _profile_page(source, source.profile)
    if source.trace:
        return _trace_page(source, source.trace)
    return _events_page(source) if source.kind == OTHER_TRACE else _kernels_page(source)


def _profile_page(source: Source, profile: Profile) -> Report:
    """The page of a profile, with what its trace tells, if the source has that."""
    run = profile["run"]
    trace = source.trace
    steps = profile["profiled_steps"]
    processes = run_record.processes(run)
    preset = f"{run['training']['preset']} {run['precision']['compute']}"
    title = f"{run['version']} {preset}, {run['device']['name']}"
    page = Report(f"{title}, {processes} processes" if processes > 1 else title)
    advice = GRAPHS if run.get("settings", {}).get("capture_step") else "Try `--capture-step`"
    page.text(launches.verdict(source, step_profile.idle_percent(profile), advice))
    parts = bottlenecks.bottleneck_report(mean_step(profile), source.path)
    page.include(parts, "", "time-of-the-step-by-span", "time-of-attention")
    if trace:
        _add_timeline(page, timeline.draw_trace(trace), f"profiled steps: {steps}")
    page.include(parts, "", "the-step-against-its-limits", "targets-of-optimization")
    if profile["kernels"]:
        page.section("Kernels")
        header, rows = launches.kernel_rows(launches.summary(source), "kernel", steps)
        title = f"A mean step, {min(TOP, len(rows))} of {len(rows)}"
        page.table(header, rows, title, code=["kernel"], top=TOP)
        page.text(profile_summary.launches(profile))
    if run["ceilings"]:
        points = roofline.from_profile(profile)
        about = "The parts and the longest operators of a mean step"
        page.include(roofline.roofline_report(points, run["ceilings"], about), "Roofline")
    page.include(parts, "", "the-operators-that-take-longest")
    page.section("Memory")
    memory_use.add_section(page, profile)
    if trace and profile["memory_peak_bytes"] is not None:
        memory_timeline.add_peak(page, trace)
    if trace:
        _add_critical_path(page, trace)
    page.section("Run")
    page.text(f"{profile_summary.conditions(profile)}. Command: `{run['command']}`")
    return page


def _trace_page(source: Source, trace: Trace) -> Report:
    """The page of a trace of torch.profiler, whoever made it."""
    page = Report(source.path.name)
    sums = chrome_trace.profile_tables(trace)
    idle = step_profile.idle_percent(sums) if source.steps else launches.idle_percent(source)
    advice = GRAPHS if trace.kernels.graph.notna().any() else FEWER
    page.text(launches.verdict(source, idle, advice))
    if source.steps:
        _add_step(page, trace, sums, idle)
    extent = f"profiled steps: {source.steps}" if source.steps else "all events"
    _add_timeline(page, timeline.draw_trace(trace), extent)
    page.include(launches.launch_report(source, TOP), "Kernels")
    if len(trace.memory):
        page.section("Memory")
        memory_timeline.add_peak(page, trace)
    _add_critical_path(page, trace)
    return page


def _kernels_page(source: Source) -> Report:
    """The page of a file of rocprofv3, rocprof-compute or ncu."""
    page = Report(source.path.name)
    page.text(launches.verdict(source, launches.idle_percent(source), FEWER))
    events = timeline.draw_calls(source)
    if events:
        _add_timeline(page, events, "all launches")
    page.include(launches.launch_report(source, TOP), "Kernels")
    if source.kind in bandwidth.COUNTED:
        traffic = bandwidth.counted_traffic(source)
        if isinstance(traffic, bandwidth.Traffic):
            page.include(bandwidth.bandwidth_report(traffic), "Memory traffic")
    return page


def _events_page(source: Source) -> Report:
    """The page of any other Chrome trace."""
    page = Report(source.path.name)
    events = timeline.draw_events(source)
    durations = source.table.groupby("name", sort=False).duration_ns
    sums = durations.agg(["size", "sum"]).sort_values("sum", ascending=False, kind="stable")
    unit, factor = tables.time_unit(sums["sum"].max() / 1e6)
    rows = [[name, calls, ns / 1e6 * factor] for name, calls, ns in sums.itertuples()]
    about = f"Events: {len(source.table):,}; tracks: {len(events['tracks'])}."
    page.text(" ".join((about, *source.notes)))
    _add_timeline(page, events, "all events")
    page.section("Events by name")
    shown = f"{min(TOP, len(rows))} of {len(rows)}"
    title = f"The {shown} names that take longest, with what they enclose"
    page.table(["event", "calls", unit], rows, title, code=["event"], top=TOP)
    return page


def _add_timeline(page: Report, events: dict[str, Any], name: str) -> None:
    page.section("Timeline")
    page.timeline(events, name)
    about = HOW_TO_READ
    if events["left_out"]:
        about += f" The {events['left_out']:,} shortest events are left out."
    page.text(about)


def _add_step(page: Report, trace: Trace, sums: Sums, idle: float | None) -> None:
    """Adds the time of a mean step by span, or by kind of work where kernels have no spans."""
    kernels = trace.kernels[trace.kernels.step >= 0]
    whole_us = sum(sums["step_us"])
    kernels_us = kernels.duration_ns.sum() / 1e3
    if idle is None or timeline.spanned(trace):
        page.section("Time of the step by span")
        page.table(*profile_summary.span_rows(sums))
    else:
        ns = kernels.duration_ns.groupby(kernels.name.map(kernel_names.kind)).sum()
        shares = ns.sort_values(ascending=False) / 10 / whole_us
        shares[bottlenecks.IDLE] = idle
        ms = whole_us / 1e3 / len(trace.steps)
        rows = [[name, share / 100 * ms, share] for name, share in shares.items()]
        page.section("Time of the step by kind of work")
        page.table(["kind", "ms", "% of step"], rows)
    page.text(*bottlenecks.overlap(kernels_us, sums["device_busy_us"]))


def _add_critical_path(page: Report, trace: Trace) -> None:
    kernels = critical_path.step(trace)
    if kernels is not None:
        page.section("Critical path")
        page.table(["quantity", "of the median step"], critical_path.summary(kernels).items())


def _page_of_two(sources: Sequence[Source], pages: Sequence[Report]) -> Report:
    """The timelines of two files on one scale, what limits each step, and how launches changed."""
    sections = [section for page in pages for section in page.sections]
    timelines = [
        item.content for section in sections for item in section.items if item.kind == "timeline"
    ]
    have_kernels = all(source.kind != OTHER_TRACE for source in sources)
    first, second = sources
    if len(timelines) < 2 and not have_kernels:
        raise UsageError(
            f"{first.path} and {second.path} have nothing in common: give two profiles or traces"
        )
    result = Report(" and ".join(dict.fromkeys(page.title for page in pages)))
    result.section("Runs")
    result.facts(
        [
            (str(number), f"{source.path}. {page.sections[0].items[0].content}")
            for number, (source, page) in enumerate(zip(sources, pages, strict=True), 1)
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
        reduction = launch_changes.compare_launches(first, second, may_differ=True)
        launch_changes.add_section(result, reduction, "changes", CHANGES)
    return result
