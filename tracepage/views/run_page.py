"""The page of a run: what limits its step, where the time goes, a timeline, and the reports for
which its file has the numbers.

    profile, with its trace beside it    everything, against the ceilings that the run measured
    trace of torch.profiler, or of nsys  timeline, time by span or range, kernels, memory
    file of another profiler             kernels; a timeline where it has times, and memory traffic
                                         where it has counters
    other Chrome trace                   timeline, and the events by name
    trace of each rank of a job          who waits for whom, timelines on one clock

Two files have both timelines, what limits each step, the causes that changed, and the launches that
went and came.

What a page says first is also written as short Markdown or as JSON, for the log of a test machine
or an assistant. The JSON of one file, with times in ms of a step:

    file, device, steps    what ran; steps is null where the file has none, and then the times are
                           those of the whole file
    step_ms
    verdict                cause, ms, gain (times as fast without it), sentence; without a timeline
                           the cause is unknown, and of 0 ms
    parts                  cause, kind (of work), ms, count, where; they add up to step_ms
    notes                  caveats of the file

Of two files it has `runs`, a list of both, and `changes`: part, before_ms, after_ms, change_ms.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracepage.causes.rank_waits import Job
from tracepage.causes.waits import StepCauses
from tracepage.cost.optimization_targets import mean_step
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, load_kernels, pytorch
from tracepage.readers.source import OTHER_TRACE, Source
from tracepage.readers.trace import Trace
from tracepage.records import run_record
from tracepage.records.step_profile import Profile
from tracepage.show import rank_sections, step_causes, tables
from tracepage.show.report import Report
from tracepage.span_names import SPANS
from tracepage.terminal import shortened
from tracepage.views import (
    bandwidth,
    bottlenecks,
    launch_changes,
    launches,
    memory_timeline,
    memory_use,
    profile_summary,
    roofline,
    timeline,
)

import pandas

TOP = 25  # Rows in the tables of kernels and events.
FEW = 10  # Rows of kernels in a summary.
NAME = 60  # Characters of a kernel's name in it.
CHANGES = 10  # Rows in the table of changes.
HOW_TO_READ = (
    "Press an event for its numbers, or a name with a colour to see only its events. "
    "The buttons, or Ctrl and the wheel, zoom."
)


def load_page_source(path: Path, capture: Path | None = None) -> Source:
    """A file that has a page; a profile with its trace, if that lies beside it. `capture`: a trace
    that has the operators of its graphs.
    """
    source = load_kernels.load(path, any_trace=True)
    return pytorch.with_capture(source, capture) if capture else pytorch.with_trace(source)


def make_page(sources: Sequence[Source]) -> Report:
    """The page of a file, or of two."""
    causes = list(map(_causes, sources))
    pages = [_page_of(*side) for side in zip(sources, causes, strict=True)]
    return _page_of_two(sources, pages, causes) if pages[1:] else pages[0]


def ranks_page(job: Job) -> Report:
    """The page of all ranks of a job."""
    device = next(iter(job.ranks.values())).device
    page = Report(", ".join(filter(None, (f"{len(job.ranks)} ranks", device))))
    rank_sections.add_sections(page, job)
    _add_timeline(page, timeline.draw_ranks(job), "all ranks on one clock")
    return page


def _causes(source: Source) -> StepCauses | None:
    """None for the trace of another program."""
    return None if source.kind == OTHER_TRACE else step_causes.attribute(source)


def _page_of(source: Source, causes: StepCauses | None) -> Report:
    if causes is None:
        return _events_page(source)
    if source.profile:
        return _profile_page(source, source.profile, causes)
    return _calls_page(source, causes)


def _profile_page(source: Source, profile: Profile, causes: StepCauses) -> Report:
    """The page of a profile, with what its trace tells, if the source has that."""
    run = profile["run"]
    trace = source.trace
    steps = profile["profiled_steps"]
    page = Report(title(source))
    step_causes.add_sections(page, causes, trace)
    parts = bottlenecks.bottleneck_report(mean_step(profile), source.path)
    page.include(parts, "", "time-of-the-step-by-span", "time-of-attention")
    if trace:
        _add_timeline(page, timeline.draw_trace(trace, causes.gaps), f"profiled steps: {steps}")
    page.include(parts, "", "the-step-against-its-limits", "targets-of-optimization")
    if profile["kernels"]:
        page.section("Kernels")
        header, rows = launches.kernel_rows(launches.summary(source), "kernel", steps)
        page.table(header, rows, "A mean step", code=["kernel"], top=TOP)
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
    page.section("Run")
    page.text(f"{profile_summary.conditions(profile)}. Command: `{run['command']}`")
    return page


def _calls_page(source: Source, causes: StepCauses) -> Report:
    """The page of a trace of torch.profiler, whoever made it, or of another profiler's file."""
    page = Report(title(source))
    trace = source.trace
    step_causes.add_sections(page, causes, trace)
    extent = f"profiled steps: {source.steps}" if source.steps else "all events"
    if trace:
        _add_times_by_place(page, source, trace)
        _add_timeline(page, timeline.draw_trace(trace, causes.gaps), extent)
    elif not source.are_operators and source.table.start_ns.notna().all():
        _add_timeline(page, timeline.draw_calls(source), "all launches")
    name = "Operators" if source.are_operators else "Kernels"
    page.include(launches.launch_report(source, TOP), name)
    if trace and len(trace.memory):
        page.section("Memory")
        memory_timeline.add_peak(page, trace)
    if source.kind in bandwidth.COUNTED:
        traffic = bandwidth.counted_traffic(source)
        if isinstance(traffic, bandwidth.Traffic):
            page.include(bandwidth.bandwidth_report(traffic), "Memory traffic")
    return page


def _add_times_by_place(page: Report, source: Source, trace: Trace) -> None:
    """Adds the time of a mean step by span, or that of all launches by the deepest range of NVTX
    around them; and that of the kernels in graphs by the annotations of their nodes.
    """
    table = source.table
    if source.steps and timeline.spanned(trace):
        sums = chrome_trace.profile_tables(trace)
        kernels = trace.kernels[trace.kernels.step >= 0]
        page.section("Time of the step by span")
        page.table(*profile_summary.span_rows(sums))
        page.text(*bottlenecks.overlap(kernels.duration_ns.sum() / 1e3, sums["device_busy_us"]))
    elif source.kind == "nsys" and table.span.nunique() > 1:
        page.section("Time by range")
        _add_times(page, table, "span", ["deepest NVTX range", "launches"])
    if source.kind == "nsys" or source.are_operators:
        return
    of_graphs = table[table.graph.notna()]
    if not of_graphs.span.isin((*SPANS, "residual", "other")).all():
        page.section("Time in graphs by annotation")
        whole = "step" if source.steps else "file"
        header = ["annotation", f"kernels a {whole}"]
        _add_times(page, of_graphs, "span", header, source.steps or 1)


def _add_times(
    page: Report, calls: pandas.DataFrame, column: str, header: list[str], steps: int = 1
) -> None:
    """Adds a table of the number and the time of calls by what a column of theirs says."""
    sums = calls.groupby(column, sort=False).duration_ns.agg(["size", "sum"]) / steps
    sums = sums.sort_values("sum", ascending=False, kind="stable")
    unit, factor = tables.time_unit(sums["sum"].max() / 1e6)
    rows = [[name, number, ns / 1e6 * factor] for name, number, ns in sums.itertuples()]
    page.table([*header, unit], rows, code=["event"], top=TOP)


def _events_page(source: Source) -> Report:
    """The page of any other Chrome trace."""
    page = Report(source.path.name)
    events = timeline.draw_events(source)
    about = f"Events: {len(source.table):,}; tracks: {len(events['tracks'])}."
    page.text(" ".join((about, *source.notes)))
    _add_timeline(page, events, "all events")
    page.section("Events by name, with what they enclose")
    _add_times(page, source.table, "name", ["event", "calls"])
    return page


def _add_timeline(page: Report, events: dict[str, Any], name: str) -> None:
    page.section("Timeline")
    page.timeline(events, name)
    page.text(HOW_TO_READ)
    if events["left_out"]:
        page.text(f"The {events['left_out']:,} shortest events are left out.")


def title(source: Source) -> str:
    """What ran: the version or the file, PyTorch where it is known, the device and the steps."""
    parts = [source.path.name]
    if source.profile:
        run = source.profile["run"]
        processes = run_record.processes(run)
        parts = [f"{run['version']} {run['training']['preset']} {run['precision']['compute']}"]
        if processes > 1:
            parts.append(f"{processes} processes")
        parts.append(f"torch {run['environment']['torch']}")
    parts.append(source.device)
    if source.steps:
        parts.append(tables.counted(source.steps, "profiled step"))
    return ", ".join(filter(None, parts))


def _page_of_two(
    sources: Sequence[Source], pages: Sequence[Report], causes: Sequence[StepCauses | None]
) -> Report:
    """The timelines of two files on one scale, what limits each step, which causes changed, and how
    launches changed.
    """
    items = [item for page in pages for section in page.sections for item in section.items]
    timelines = [item.content for item in items if item.kind == "timeline"]
    known = [side for side in causes if side]
    have_kernels = len(known) == 2
    first, second = sources
    if len(timelines) < 2 and not have_kernels:
        raise UsageError(
            f"{first.path} and {second.path} have nothing in common: give two profiles or traces"
        )
    result = Report(" and ".join(dict.fromkeys(page.title for page in pages)))
    result.section("Runs")
    sentences = [
        f"{source.path}. {page.first_sentence()}"
        for source, page in zip(sources, pages, strict=True)
    ]
    result.facts(list(zip("12", sentences, strict=True)))
    if have_kernels:
        result.text(*launch_changes.device_notes(*sources))
        step_causes.add_changes(result, *known)
    if timelines:
        result.section("Timeline")
        for number, (name, events) in enumerate(timelines, 1):
            result.timeline(events, f"{number}: {name}")
        result.text(HOW_TO_READ)
    if have_kernels:
        result.section("Launches")
        reduction = launch_changes.compare_launches(first, second, may_differ=True)
        launch_changes.add_section(result, reduction, "changes", CHANGES)
    return result


def _causes_of_steps(sources: Sequence[Source]) -> list[StepCauses]:
    """UsageError: one is the trace of another program, or two do not count the same."""
    for source in sources:
        if source.kind == OTHER_TRACE:
            raise UsageError(
                f"{source.path} has no kernels and no operators of PyTorch: "
                "only a page shows it, --output FILE.html"
            )
    if len(sources) == 2:
        launch_changes.require_one_measure(*sources)
    return list(map(step_causes.attribute, sources))


def summary_report(sources: Sequence[Source]) -> Report:
    """Verdict, parts, longest waits and kernels of a file, or what changed between two."""
    causes = _causes_of_steps(sources)
    titles = list(map(title, sources))
    report = Report(" and ".join(titles))
    if len(sources) == 2:
        sentences = [side.verdict["sentence"] for side in causes]
        report.facts(list(zip("12", sentences, strict=True)))
        report.text(*launch_changes.device_notes(*sources))
        step_causes.add_changes(report, *causes)
        return report
    [source] = sources
    step_causes.add_sections(report, causes[0], source.trace)
    label = "operator" if source.are_operators else "kernel"
    rows = launches.summary(source).head(FEW)
    header, body = launches.kernel_rows(rows, label, source.steps or 1)
    named = [[shortened(name, NAME), *numbers] for name, *numbers in body]
    report.section(f"{label.capitalize()}s that take longest")
    report.table(header, named, code=[label])
    report.text(*source.notes)
    return report


def summary_json(sources: Sequence[Source]) -> dict[str, Any]:
    """The content of the JSON file."""
    causes = _causes_of_steps(sources)
    runs = [_run(*side) for side in zip(sources, causes, strict=True)]
    if len(runs) == 1:
        return runs[0]
    keys = ("part", "before_ms", "after_ms", "change_ms")
    rows = [dict(zip(keys, row, strict=True)) for row in step_causes.changes(*causes)]
    return {"runs": runs, "changes": rows}


def _run(source: Source, causes: StepCauses) -> dict[str, Any]:
    return {
        "file": str(source.path),
        "device": source.device,
        "steps": source.steps,
        "step_ms": causes.step_ms,
        "verdict": causes.verdict,
        "parts": causes.parts,
        "notes": source.notes,
    }
