"""Memory traffic by kernel: bytes, bandwidth, its share of the measured bandwidth, and the time
above the bound.

Bytes come from counters of ncu or rocprof-compute (`work_counters`) where a folder has them. Else
they are a minimum: the shapes of the operators in a profile, every tensor moved once
(`operators.cost`). The bandwidth is that of a large copy in the profiled run, or HBM in
rocprof-compute's roofline.csv, never a data sheet's. The bound of a row with B bytes and, where
they are known, F FLOPs is max(B / bandwidth, F / peak). Where the rest of a row's time is largest,
most can be gained.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.readers import kernel_table, load_kernels, rocm, work_counters
from tracepage.readers.kernel_names import short_name
from tracepage.records import step_profile
from tracepage.records.fields import Ceilings
from tracepage.records.run_record import TimedRun
from tracepage.records.step_profile import Profile
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.show.tables import format_number, format_time
from tracepage.views import profile_summary, roofline

TOP = 20  # rows in the table
HEADER = ["name", "calls", "us", "MB", "GB/s", "% of copy", "bound by", "us above bound"]
MEASURED = "measured by counters"
MINIMUM = "a minimum: every tensor of an operator moved once"
# `work` of the ceilings in a roofline.csv, whose FLOPs are those that the counters count
UNITS = "units"
INPUT_HINT = (
    "profile with `bash run_all_profilers.sh --enable-rocm-tools --profile-dir DIR`, which writes a profile_*.json and, where "
    "there is such a tool, counters of ncu or rocprof-compute"
)
HOW_TO_READ = (
    "The bound of a row is the time for its bytes at the measured bandwidth or, where FLOPs are known and need longer, for its "
    "FLOPs at the measured rate. Below 0 above that bound, data came from a cache, the work ran in another precision than the "
    "one measured, or it only reads."
)


class KernelTraffic(NamedTuple):
    """All calls of a kernel, or of an operator in one span: of a mean step, or of everything that
    was recorded.
    """

    name: str
    calls: float
    seconds: float
    bytes: float
    flops: float | None = None


class Traffic(NamedTuple):
    """Memory traffic of a folder or file."""

    rows: list[KernelTraffic]  # the longest first
    bytes_are: str  # MEASURED or MINIMUM
    path: Path  # the file that the bytes come from
    # None if nothing was measured; the FLOP/s are infinite if only they were not
    ceilings: Ceilings | None
    ceilings_from: str  # what measured them
    notes: list[str]  # caveats, for a reader of the numbers
    # the newest; where the bytes are a MINIMUM, the rows come from it and are of a mean step
    profile: Profile | None


def from_counters(found: kernel_table.Kernels) -> list[KernelTraffic] | str:
    """A row per kernel, or the names of the counters that are missing."""
    moved = work_counters.moved_bytes(found)
    if isinstance(moved, str):
        return moved
    launches = found.table.assign(
        bytes=moved, flops=work_counters.flops(found).sum(axis=1, min_count=1)
    )
    counted = launches[moved.notna() & (launches.duration_ns > 0)]
    added = counted.groupby("name")[["calls", "duration_ns", "bytes", "flops"]].sum(min_count=1)
    added = added.sort_values("duration_ns", ascending=False, kind="stable")
    return [
        KernelTraffic(
            name, int(calls), ns / 1e9, float(total), None if flops != flops else float(flops)
        )
        for name, calls, ns, total, flops in added.itertuples()
    ]


def from_profile(profile: Profile) -> tuple[list[KernelTraffic], list[str]]:
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
    rows = []
    for name, own in known.items():
        calls = sum(row.calls for row in own)
        seconds = sum(row.us for row in own) / 1e6
        moved = sum(row.calls * (row.bytes or 0) for row in own)
        rows.append(
            KernelTraffic(
                name, calls, seconds, moved, sum(row.calls * (row.flops or 0) for row in own)
            )
        )
    notes = ["only attention was kept"] if profile["attention_only"] else []
    if unknown:
        notes.append(
            f"left out, {100 * unknown / whole:.1f} % of the operators' time: operators whose bytes a trace does not record "
            "(a version's own kernels, code of torch.compile, an optimizer's operators on long lists of tensors)"
        )
    if collectives:
        notes.append(f"left out: collectives, {collectives / 1e3:.3g} ms a step")
    return sorted(rows, key=lambda row: -row.seconds), notes


def step_limits(profile: Profile, run: TimedRun | None = None) -> dict[str, float | None]:
    """How near a step comes to what limits it, and how long the GPU waits, by the heads of columns;
    None where not known.

    Bytes are the least that the operators have to move. Launches are those of a step, each at the
    measured cost of one small operation; on a CPU nothing is launched. A profiler slows the host,
    so idle time is an upper bound. The step time is that of `run`, of the same configuration, or
    the profile's own.
    """
    run = run or profile["run"]
    rows = from_profile(profile)[0]
    ceilings = run["ceilings"]
    seconds = run["step_ms"]["median"] / 1e3
    moved = sum(row.bytes for row in rows)
    launches = profile["launch"]["count"] / profile["profiled_steps"] or None
    return {
        "MFU %": run_facts.mfu(run),
        "% of measured GEMM": run_facts.of_measured_gemm(run),
        "% of measured copy": 100 * moved / seconds / ceilings["bytes_per_second"]
        if ceilings
        else None,
        "launches": launches,
        "launches, % of step": 100 * launches * ceilings["operation_seconds"] / seconds
        if ceilings and launches
        else None,
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
    amount = f"at least {format_number(moved / 1e6)} MB by PyTorch's operators (our own kernels are not counted)"
    amount += f", {format_number(rate / 1e9)} GB/s"
    work = f"{format_number(intensity)} FLOP/byte of these operators"
    if not ceilings or not flops:
        return [("bytes a step", amount), ("intensity", work)]
    copy = ceilings["bytes_per_second"]
    ridge = roofline.ridge(ceilings)
    needed = ceilings["flops_per_second"] / intensity
    first, second = ("FLOPs", "bytes") if intensity >= ridge else ("bytes", "FLOPs")
    times = f"{format_number(needed / copy)} times the measured copy"
    return [
        ("bytes a step", f"{amount}, {100 * rate / copy:.3g} % of the measured copy"),
        (
            "intensity",
            f"{work}; ridge point {format_number(ridge)}, so {first} bind before {second}",
        ),
        (
            "needed",
            f"{format_number(needed / 1e9)} GB/s for these operators at the rate of the measured GEMM, {times}",
        ),
    ]


def read(path: Path) -> Traffic:
    """Memory traffic from the best source in a folder, or from a file."""
    files = load_kernels.find(path) if path.is_dir() else {load_kernels.load(path).source: [path]}
    profile = step_profile.read(files["profile"][0]) if "profile" in files else None
    notes: list[str] = []
    for file in [*files.get("ncu", ()), *files.get("rocprof-compute", ())]:
        found = load_kernels.load(file)
        rows = from_counters(found)
        if isinstance(rows, str) or not rows:
            lacking = rows or "a launch with both a duration and bytes"
            notes.append(f"{file} does not say how many bytes were moved: it lacks {lacking}")
            continue
        notes += found.notes
        if left_out := len(found.table) - sum(row.calls for row in rows):
            notes.append(
                f"left out, {left_out} of {len(found.table)} launches: their bytes were not counted"
            )
        ceilings = _ceilings(path, profile, work_counters.flops(found).sum().to_dict())
        return Traffic(rows, MEASURED, file, *ceilings, notes, profile)
    if profile:
        rows, more = from_profile(profile)
        if rows:
            return Traffic(
                rows,
                MINIMUM,
                files["profile"][0],
                *_ceilings(path, profile, {}),
                notes + more,
                profile,
            )
        notes.append(
            f"{files['profile'][0]} holds no operator that took time and whose bytes are known"
        )
    raise UsageError(
        f"{'; '.join(notes) or f'nothing in {path} says how many bytes were moved'}: {INPUT_HINT}"
    )


def _ceilings(path: Path, profile: Profile | None, flops: Mapping) -> tuple[Ceilings | None, str]:
    """Ceilings of the profiled run, else those in a roofline.csv of rocprof-compute, in the folder
    or beside the file, and what measured them; `flops` are those counted by number format, named as
    there.
    """
    if profile and (own := profile["run"]["ceilings"]):
        return own, "a large copy in the profiled run"
    for file in (
        sorted(path.rglob("roofline.csv")) if path.is_dir() else [path.with_name("roofline.csv")]
    ):
        if file.is_file():
            bandwidth, measured = rocm.read_rocprof_ceilings(file)
            if bandwidth:
                main = max(flops, key=lambda name: flops[name], default="")
                peak = (measured.get(main) if flops.get(main) else None) or math.inf
                rates = Ceilings(
                    flops_per_second=peak,
                    bytes_per_second=bandwidth,
                    operation_seconds=0,
                    precision=main,
                    work=UNITS,
                )
                return rates, str(file)
    return None, ""


def table(traffic: Traffic) -> list[list[Any]]:
    """A row per kernel or operator, with the columns of HEADER; None where ceilings or FLOPs are
    not known.
    """
    rows: list[list[Any]] = []
    for row in traffic.rows:
        rate = row.bytes / row.seconds
        under_ceilings = list[Any]([None] * 3)
        if traffic.ceilings:
            bandwidth = traffic.ceilings["bytes_per_second"]
            bound = operators.least_seconds(row.flops or 0, row.bytes, traffic.ceilings)
            known = row.flops is not None and math.isfinite(traffic.ceilings["flops_per_second"])
            side = ("compute" if bound > row.bytes / bandwidth else "memory") if known else None
            under_ceilings = [100 * rate / bandwidth, side, 1e6 * (row.seconds - bound)]
        rows.append(
            [row.name, row.calls, 1e6 * row.seconds, row.bytes / 1e6, rate / 1e9, *under_ceilings]
        )
    return rows


def facts(traffic: Traffic) -> list[tuple[str, str]]:
    """Origin and amount of the bytes, and the share of the time that they need."""
    total = sum(row.bytes for row in traffic.rows)
    seconds = sum(row.seconds for row in traffic.rows)
    of = (
        "operators in a mean step"
        if traffic.bytes_are == MINIMUM
        else "kernels, all that was recorded"
    )
    result = [
        ("bytes", f"{traffic.bytes_are}, from {traffic.path}"),
        ("total", f"{format_number(total / 1e6)} MB in {format_time(1e3 * seconds)} of {of}"),
    ]
    if traffic.ceilings:
        bandwidth = traffic.ceilings["bytes_per_second"]
        least = format_time(1e3 * total / bandwidth)
        share = 100 * total / bandwidth / seconds
        result.append(
            ("bandwidth", f"{format_number(bandwidth / 1e9)} GB/s: {traffic.ceilings_from}")
        )
        result.append(("at least", f"{least} at that bandwidth, {share:.3g} % of that time"))
    else:
        result.append(("bandwidth", f"not measured, so no percentages: {INPUT_HINT}"))
    return [*result, *(("note", note) for note in traffic.notes)]


def report(traffic: Traffic) -> Report:
    """The facts and the longest rows with short names; bandwidth.csv has all rows with full names
    and times in us.
    """
    result = Report("Memory bandwidth")
    rows = table(traffic)
    result.facts(facts(traffic))
    per_step = " in a step" if traffic.bytes_are == MINIMUM else ""
    title = f"The longest {min(TOP, len(rows))} of {len(rows)}, with all their calls{per_step}"
    shown = [[short_name(name), *cells] for name, *cells in rows[:TOP]]
    result.table(*tables.filled(HEADER, shown), title=title, code=["name"])
    result.csv("bandwidth", HEADER, rows)
    if points := _counted(traffic):
        header, under_roof = roofline.table(points, traffic.ceilings)
        result.table(
            *tables.filled(header, under_roof),
            title="Under the roofline",
            csv="points",
            least=["ridge", "MB"],
        )
    if traffic.ceilings:
        result.text(HOW_TO_READ)
    return result


def _counted(traffic: Traffic) -> list[roofline.Point]:
    """A point per kernel if rocprof-compute counted bytes and FLOPs and measured both ceilings,
    else none.
    """
    found = traffic.ceilings
    if not found or found.get("work") != UNITS or math.isinf(found["flops_per_second"]):
        return []
    return [
        roofline.Point(short_name(row.name), row.flops, row.bytes, row.seconds)
        for row in traffic.rows
    ]


def analyze(path: Path, folder: Path, draw_roofline: bool) -> str:
    """Writes bandwidth.csv and .md into `folder`, and roofline.png where asked for; returns the
    text for a terminal.
    """
    traffic = read(path)
    result = report(traffic)
    points = _counted(traffic)
    ceilings = traffic.ceilings
    title = f"{traffic.path}, bytes and FLOPs counted"
    if draw_roofline and not points:
        if not traffic.profile:
            raise UsageError(
                f"{path} holds no profile_*.json, which --generate-roofline-plot needs for FLOPs: {INPUT_HINT}"
            )
        points = roofline.from_profile(traffic.profile)
        ceilings = traffic.profile["run"]["ceilings"]
        title = profile_summary.conditions(traffic.profile)
    if draw_roofline:
        result.figure(
            lambda: roofline.figure(points, ceilings, title),
            "roofline",
            f"Roofline; bytes are {traffic.bytes_are}",
        )
    return result.publish(folder, "bandwidth")
