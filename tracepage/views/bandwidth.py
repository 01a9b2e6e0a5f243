"""Memory traffic by kernel: bytes, bandwidth, its share of the measured bandwidth, and the time
above the bound.

Bytes come from counters of ncu or rocprof-compute (`work_counters`) where a folder has them. Else
they are a minimum: the shapes of the operators in a profile, every tensor moved once
(`operators.cost`). The bandwidth is that of a large copy in the profiled run, or HBM in
rocprof-compute's roofline.csv, never a data sheet's. The bound of a row with B bytes and, where
they are known, F FLOPs is max(B / bandwidth, F / peak). Where the rest of a row's time is largest,
most can be gained.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.readers import load_kernels, rocm, work_counters
from tracepage.readers.kernel_names import short_name
from tracepage.readers.source import Source
from tracepage.records import step_profile
from tracepage.records.fields import Ceilings
from tracepage.records.run_record import TimedRun
from tracepage.records.step_profile import Profile
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.show.tables import format_number, format_time
from tracepage.views import profile_summary, roofline
from tracepage.views.roofline import Point

TOP = 20  # Rows in the table.
HEADER = ["name", "calls", "us", "MB", "GB/s", "% of copy", "bound by", "us above bound"]
COUNTED = ("ncu", "rocprof-compute")  # Sources whose counters can tell bytes.
MEASURED = "measured by counters"
MINIMUM = "a minimum: every tensor of an operator moved once"
# The `work` of the ceilings in a roofline.csv, whose FLOPs are those that the counters count.
UNITS = "units"
INPUT_HINT = (
    "profile with `bash run_all_profilers.sh --enable-rocm-tools --profile-dir DIR`, which writes "
    "a profile_*.json and, where there is such a tool, counters of ncu or rocprof-compute"
)
HOW_TO_READ = (
    "The bound of a row is the time for its bytes at the measured bandwidth or, where FLOPs are "
    "known and need longer, for its FLOPs at the measured rate. Below 0 above that bound, data "
    "came from a cache, the work ran in another precision than the one measured, or it only reads."
)


class Traffic(NamedTuple):
    """Memory traffic of a folder or file."""

    # All calls of a kernel in everything that was recorded, or of an operator in one span of a mean
    # step, the longest first.
    rows: list[Point]
    bytes_are: str  # MEASURED or MINIMUM
    path: Path  # The file that the bytes come from.
    # None if nothing was measured; the FLOP/s are infinite if only they were not.
    ceilings: Ceilings | None
    ceilings_from: str  # What measured them.
    notes: list[str]  # Caveats, for a reader of the numbers.
    # The newest; where the bytes are a MINIMUM, the rows come from it and are of a mean step.
    profile: Profile | None


def from_counters(source: Source) -> list[Point] | str:
    """A row per kernel, or the names of the counters that are missing."""
    moved = work_counters.moved_bytes(source)
    if isinstance(moved, str):
        return moved
    counted = work_counters.flops(source).sum(axis=1, min_count=1)
    launches = source.table.assign(bytes=moved, flops=counted)
    launches = launches[moved.notna() & (launches.duration_ns > 0)]
    added = launches.groupby("name")[["calls", "duration_ns", "bytes", "flops"]].sum(min_count=1)
    added = added.sort_values("duration_ns", ascending=False, kind="stable")
    rows = []
    for name, calls, ns, total, flops in added.itertuples():
        known = None if math.isnan(flops) else float(flops)
        rows.append(Point(name, known, float(total), ns / 1e9, calls=int(calls)))
    return rows


def from_profile(profile: Profile) -> tuple[list[Point], list[str]]:
    """A row per operator and span of a mean step, and notes about them."""
    known: dict[str, list[operators.OperatorCalls]] = defaultdict(list)
    unknown = whole = collectives = 0.0
    for row in operators.rows(profile):
        if operators.COMMUNICATION.search(row.name):
            collectives += row.us
            continue
        whole += row.us
        if row.bytes is None or row.flops is None:
            unknown += row.us
        elif row.bytes:
            known[f"{row.name} ({row.span})"].append(row)
    notes = ["only attention was kept"] if profile["attention_only"] else []
    if unknown:
        notes.append(
            f"left out, {100 * unknown / whole:.1f} % of the operators' time: operators whose "
            "bytes a trace does not record (a version's own kernels, code of torch.compile, "
            "an optimizer's operators on long lists of tensors)"
        )
    if collectives:
        notes.append(f"left out: collectives, {format_time(collectives / 1e3)} a step")
    return roofline.points(known), notes


def moved_bytes(rows: Iterable[Point]) -> float:
    return sum(row.bytes or 0 for row in rows)


def step_limits(profile: Profile, run: TimedRun | None = None) -> dict[str, float | None]:
    """How near a step comes to what limits it, and how long the GPU waits, by the heads of columns;
    None where not known.

    Bytes are the least that the operators have to move. Launches are those of a step, each at the
    measured cost of one small operation; on a CPU nothing is launched. A profiler slows the host,
    so idle time is an upper bound. The step time is that of `run`, of the same configuration, or
    the profile's own.
    """
    run = run or profile["run"]
    ceilings = run["ceilings"]
    seconds = run["step_ms"]["median"] / 1e3
    launches = profile["launch"]["count"] / profile["profiled_steps"] or None
    of_copy = None
    of_launches = None
    if ceilings:
        moved = moved_bytes(from_profile(profile)[0])
        of_copy = 100 * moved / seconds / ceilings["bytes_per_second"]
    if ceilings and launches:
        of_launches = 100 * launches * ceilings["operation_seconds"] / seconds
    return {
        "MFU %": run_facts.mfu(run),
        "% of measured GEMM": run_facts.of_measured_gemm(run),
        "% of measured copy": of_copy,
        "launches": launches,
        "launches, % of step": of_launches,
        "GPU idle %": step_profile.idle_percent(profile),
    }


def demand(
    flops: float, moved: float, seconds: float, ceilings: Ceilings | None
) -> list[tuple[str, str]]:
    """What a step of these FLOPs, bytes (more than 0) and seconds asks of the memory; the shares
    need measured ceilings.
    """
    rate = moved / seconds
    intensity = flops / moved
    amount = (
        f"at least {format_number(moved / 1e6)} MB by PyTorch's operators alone, "
        f"{format_number(rate / 1e9)} GB/s"
    )
    work = f"{format_number(intensity)} FLOP/byte of these operators"
    if not ceilings or not flops:
        return [("bytes a step", amount), ("intensity", work)]
    copy = ceilings["bytes_per_second"]
    ridge = roofline.ridge(ceilings)
    needed = ceilings["flops_per_second"] / intensity
    order = "FLOPs bind before bytes" if intensity >= ridge else "bytes bind before FLOPs"
    return [
        ("bytes a step", f"{amount}, {100 * rate / copy:.3g} % of the measured copy"),
        ("intensity", f"{work}; ridge point {format_number(ridge)}, so {order}"),
        (
            "needed",
            f"{format_number(needed / 1e9)} GB/s for these operators at the rate of the measured "
            f"GEMM, {format_number(needed / copy)} times the measured copy",
        ),
    ]


def load_traffic(path: Path) -> Traffic:
    """Memory traffic from the best source in a folder, or from a file: of the first that counted
    bytes, else of the newest profile. UsageError: neither tells it.
    """
    paths = [path]
    if path.is_dir():
        files = load_kernels.find(path)
        paths = files.get("profile", [])[:1]
        paths += [file for kind in COUNTED for file in files.get(kind, ())]
    notes: list[str] = []
    profile_path = path
    profile = None
    for source in map(load_kernels.load, paths):
        if source.profile:
            profile_path = source.path
            profile = source.profile
        elif source.kind in COUNTED:
            traffic = counted_traffic(source, path, profile)
            if isinstance(traffic, Traffic):
                return traffic._replace(notes=notes + traffic.notes)
            notes.append(traffic)
    if profile:
        rows, more = from_profile(profile)
        if rows:
            ceilings = _ceilings(path, profile, {})
            return Traffic(rows, MINIMUM, profile_path, *ceilings, notes + more, profile)
        notes.append(f"{profile_path} holds no operator that took time and whose bytes are known")
    reasons = "; ".join(notes) or f"nothing in {path} says how many bytes were moved"
    raise UsageError(f"{reasons}: {INPUT_HINT}")


def counted_traffic(
    source: Source, path: Path | None = None, profile: Profile | None = None
) -> Traffic | str:
    """The traffic that a source of COUNTED counted, or why it did not; `path` is the file or folder
    that may hold the ceilings, and `profile` one that may.
    """
    rows = from_counters(source)
    if isinstance(rows, str) or not rows:
        lacking = rows or "a launch with both a duration and bytes"
        return f"{source.path} does not say how many bytes were moved: it lacks {lacking}"
    notes = list(source.notes)
    left_out = len(source.table) - sum(row.calls for row in rows)
    if left_out:
        launches = f"{left_out} of {len(source.table)} launches"
        notes.append(f"left out, {launches}: their bytes were not counted")
    flops = work_counters.flops(source).sum().to_dict()
    ceilings = _ceilings(path or source.path, profile, flops)
    return Traffic(rows, MEASURED, source.path, *ceilings, notes, profile)


def _ceilings(
    path: Path, profile: Profile | None, flops: dict[Any, float]
) -> tuple[Ceilings | None, str]:
    """Ceilings of the profiled run, else those in a roofline.csv of rocprof-compute, in the folder
    or beside the file, and what measured them; `flops` are those counted by number format, named as
    there.
    """
    if profile and profile["run"]["ceilings"]:
        return profile["run"]["ceilings"], "a large copy in the profiled run"
    beside = path.parent.glob("roofline.csv")
    for file in sorted(path.rglob("roofline.csv") if path.is_dir() else beside):
        bandwidth, peaks = rocm.read_rocprof_ceilings(file)
        if bandwidth:
            main = max(flops, key=lambda name: flops[name], default="")
            peak = peaks.get(main) if flops.get(main) else None
            ceilings: Ceilings = {
                "flops_per_second": peak or math.inf,
                "bytes_per_second": bandwidth,
                "operation_seconds": 0,
                "precision": main,
                "work": UNITS,
            }
            return ceilings, str(file)
    return None, ""


def table(traffic: Traffic) -> list[list[Any]]:
    """A row per kernel or operator, with the columns of HEADER; None where ceilings or FLOPs are
    not known.
    """
    rows: list[list[Any]] = []
    ceilings = traffic.ceilings
    for row in traffic.rows:
        moved = row.bytes or 0
        rate = moved / row.seconds
        under_ceilings: list[Any] = [None, None, None]
        if ceilings:
            copy = ceilings["bytes_per_second"]
            bound = operators.least_seconds(row.flops or 0, moved, ceilings)
            side = "compute" if bound > moved / copy else "memory"
            known = row.flops is not None and math.isfinite(ceilings["flops_per_second"])
            above = 1e6 * (row.seconds - bound)
            under_ceilings = [100 * rate / copy, side if known else None, above]
        amounts = [1e6 * row.seconds, moved / 1e6, rate / 1e9]
        rows.append([row.name, row.calls, *amounts, *under_ceilings])
    return rows


def facts(traffic: Traffic) -> list[tuple[str, str]]:
    """Origin and amount of the bytes, and the share of the time that they need."""
    total = moved_bytes(traffic.rows)
    seconds = sum(row.seconds for row in traffic.rows)
    extent = "kernels, all that was recorded"
    if traffic.bytes_are == MINIMUM:
        extent = "operators in a mean step"
    time = format_time(1e3 * seconds)
    result = [
        ("bytes", f"{traffic.bytes_are}, from {traffic.path}"),
        ("total", f"{format_number(total / 1e6)} MB in {time} of {extent}"),
    ]
    if traffic.ceilings:
        copy = traffic.ceilings["bytes_per_second"]
        least = format_time(1e3 * total / copy)
        share = 100 * total / copy / seconds
        result += [
            ("bandwidth", f"{format_number(copy / 1e9)} GB/s: {traffic.ceilings_from}"),
            ("at least", f"{least} at that bandwidth, {share:.3g} % of that time"),
        ]
    else:
        result.append(("bandwidth", f"not measured, so no percentages: {INPUT_HINT}"))
    return [*result, *(("note", note) for note in traffic.notes)]


def bandwidth_report(traffic: Traffic) -> Report:
    """The facts and the longest rows with short names; bandwidth.csv has all rows with full names
    and times in us.
    """
    report = Report("Memory bandwidth", [traffic.path])
    rows = table(traffic)
    report.facts(facts(traffic))
    per_step = " in a step" if traffic.bytes_are == MINIMUM else ""
    title = f"The longest, with all their calls{per_step}"
    named = [[short_name(name), *cells] for name, *cells in rows]
    report.table(*tables.filled(HEADER, named), title, code=["name"], top=TOP)
    report.csv("bandwidth", HEADER, rows)
    if not traffic.ceilings:
        return report
    if _counted(traffic.ceilings):
        roof = tables.filled(*roofline.table(_named(traffic), traffic.ceilings))
        report.table(*roof, title="Under the roofline", csv="points", least=["ridge", "MB"])
    report.text(HOW_TO_READ)
    return report


def _counted(ceilings: Ceilings) -> bool:
    """Whether rocprof-compute measured both ceilings."""
    return ceilings.get("work") == UNITS and math.isfinite(ceilings["flops_per_second"])


def _named(traffic: Traffic) -> list[Point]:
    return [row._replace(name=short_name(row.name)) for row in traffic.rows]


def write_bandwidth(path: Path, folder: Path, draw_roofline: bool) -> str:
    """Writes bandwidth.csv and .md into `folder`, and roofline.png where asked for; returns the
    text for a terminal.
    """
    traffic = load_traffic(path)
    report = bandwidth_report(traffic)
    if not draw_roofline:
        return report.publish(folder, "bandwidth")
    ceilings = traffic.ceilings
    points = _named(traffic)
    title = f"{traffic.path}, bytes and FLOPs counted"
    if not ceilings or not _counted(ceilings):
        if not traffic.profile:
            raise UsageError(
                f"{path} holds no profile_*.json, which --generate-roofline-plot needs for FLOPs: "
                f"{INPUT_HINT}"
            )
        ceilings = roofline.measured(traffic.profile["run"]["ceilings"])
        points = roofline.from_profile(traffic.profile)
        title = profile_summary.conditions(traffic.profile)
    about = f"Roofline; bytes are {traffic.bytes_are}"
    draw = functools.partial(roofline.figure, points, ceilings, title)
    report.figure(draw, "roofline", about)
    return report.publish(folder, "bandwidth")
