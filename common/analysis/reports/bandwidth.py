"""Memory traffic by kernel: bytes, bandwidth, its share of the measured bandwidth, and the time above the bound.

Bytes come from the best source in a folder that run_all_profilers.sh wrote, or from one file:

    ncu, rocprof-compute   measured by counters (`memory_counters`)
    profile                a minimum: the shapes of the operators in profile_*.json, every tensor moved once (`operators.cost`)

The bandwidth is that of a large copy in the profiled run, or HBM in rocprof-compute's roofline.csv, never a data sheet's. The
bound of a row with B bytes and, where the profile gives them, F FLOPs is max(B / bandwidth, F / peak). The rest of its time is
time above the bound; where it is largest, most can be gained.
"""

from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.formulas import operators
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.analysis.output.tables import format_number
from common.analysis.profiles import kernel_names, kernel_table, load_kernels, memory_counters, rocm
from common.analysis.reports import profile_summary, roofline
from common.errors import UsageError
from common.records import step_profile
from common.records.step_profile import Profile

from typing_extensions import NotRequired, TypedDict

TOP, NEAR = 20, 80  # rows in the tables; percent of the bound from which on a row counts as near it
HEADER = ["name", "calls", "us", "MB", "GB/s", "% of copy", "bound by", "us above bound", "L2 MB"]
NO_FLOPS_NOTE = (
    "FLOPs were not counted, so matrix products and other compute-bound kernels can be far from this bound without loss"
)
MEASURED, MINIMUM = "measured by counters", "a minimum: every tensor of an operator moved once"
INPUT_HINT = (
    "profile with `bash run_all_profilers.sh --enable-rocm-tools --profile-dir DIR`, which writes a profile_*.json and, where "
    "there is such a tool, counters of ncu or rocprof-compute"
)
HOW_TO_READ = (
    "The bound of a row is the time for its bytes at the measured bandwidth or, where FLOPs are known and need longer, for its "
    "FLOPs at the rate of the measured GEMM. Below 0 above that bound, data came from a cache, or the work ran in another "
    "precision than the GEMM."
)


class Ceilings(TypedDict):
    """Ceilings that something measured, and what that was."""

    bytes_per_second: float
    flops_per_second: NotRequired[float]
    source: str


class KernelTraffic(NamedTuple):
    """All calls of a kernel, or of an operator in one span: of a mean step, or of everything that was recorded."""

    name: str
    calls: float
    seconds: float
    bytes: float
    flops: float | None = None
    l2_bytes: float | None = None

    def bound(self, ceilings: Ceilings) -> float:
        """A lower bound on the seconds for these bytes and FLOPs."""
        return max(self.bytes / ceilings["bytes_per_second"], (self.flops or 0) / ceilings.get("flops_per_second", float("inf")))


class Traffic(NamedTuple):
    """Memory traffic of a folder or file.

    Attributes:
        rows: the longest first.
        bytes_are: MEASURED or MINIMUM.
        path: the file that the bytes come from.
        ceilings: None if nothing was measured.
        notes: caveats, for a reader of the numbers.
        profile: the newest profile_*.json. Where the bytes are a MINIMUM, the rows come from it and are of a mean step.
    """

    rows: list[KernelTraffic]
    bytes_are: str
    path: Path
    ceilings: Ceilings | None
    notes: list[str]
    profile: Profile | None


def from_counters(found: kernel_table.Kernels) -> list[KernelTraffic] | str:
    """A row per kernel, or the names of the counters that are missing."""
    moved = memory_counters.moved_bytes(found)
    if isinstance(moved, str):
        return moved
    launches = found.table.assign(bytes=moved, l2=found.counters.get(memory_counters.L2_BYTES, float("nan")))
    counted = launches[moved.notna() & (launches.duration_ns > 0)]
    added = counted.groupby("name")[["calls", "duration_ns", "bytes", "l2"]].sum(min_count=1)
    added = added.sort_values("duration_ns", ascending=False, kind="stable")
    return [
        KernelTraffic(name, int(calls), ns / 1e9, float(total), l2_bytes=None if l2 != l2 else float(l2))
        for name, calls, ns, total, l2 in added.itertuples()
    ]


def from_profile(profile: Profile) -> tuple[list[KernelTraffic], list[str]]:
    """A row per operator and span of a mean step, and notes about them."""
    added: dict[str, KernelTraffic] = {}
    unknown = whole = 0.0
    for row in operators.rows(profile):
        whole += row.us
        if row.bytes is None or row.flops is None:
            unknown += row.us
        elif row.bytes:
            name = f"{row.name} ({row.span})"
            _, calls, seconds, moved, flops, _ = added.get(name, KernelTraffic(name, 0.0, 0.0, 0.0, 0.0))
            work = moved + row.calls * row.bytes, (flops or 0.0) + row.calls * row.flops
            added[name] = KernelTraffic(name, calls + row.calls, seconds + row.us / 1e6, *work)
    notes = ["only attention was kept"] if profile["attention_only"] else []
    if unknown:
        notes.append(
            f"left out, {100 * unknown / whole:.1f} % of the operators' time: operators whose bytes a trace does not record "
            "(code of torch.compile, an optimizer's operators on long lists of tensors)"
        )
    return sorted(added.values(), key=lambda row: -row.seconds), notes


def read(path: Path) -> Traffic:
    """Memory traffic from the best source in a folder, or from a file.

    Raises:
        UsageError: no source gives the bytes that were moved, or a file is damaged.
    """
    files = load_kernels.find(path) if path.is_dir() else {load_kernels.load(path).source: [path]}
    profile = step_profile.read(files["profile"][0]) if "profile" in files else None
    ceilings, notes = _ceilings(path, profile), []
    for file in [*files.get("ncu", ()), *files.get("rocprof-compute", ())]:
        found = load_kernels.load(file)
        rows = from_counters(found)
        if isinstance(rows, str):
            notes.append(f"{file} does not say how many bytes were moved: it lacks {rows}")
            continue
        if not rows:
            notes.append(f"{file} has no launch with both a duration and bytes")
            continue
        notes += [*found.notes, NO_FLOPS_NOTE]
        if left_out := len(found.table) - sum(row.calls for row in rows):
            notes.append(f"left out, {left_out} of {len(found.table)} launches: their bytes were not counted")
        return Traffic(rows, MEASURED, file, ceilings, notes, profile)
    if profile:
        rows, more = from_profile(profile)
        if rows:
            return Traffic(rows, MINIMUM, files["profile"][0], ceilings, notes + more, profile)
        notes.append(f"{files['profile'][0]} holds no operator that took time and whose bytes are known")
    raise UsageError(f"{'; '.join(notes) or f'nothing in {path} says how many bytes were moved'}: {INPUT_HINT}")


def _ceilings(path: Path, profile: Profile | None) -> Ceilings | None:
    """Ceilings of the profiled run, else of HBM in a roofline.csv of rocprof-compute, in the folder or beside the file."""
    if profile and (own := profile["run"]["ceilings"]):
        source = "a large copy in the profiled run"
        return Ceilings(bytes_per_second=own["bytes_per_second"], flops_per_second=own["flops_per_second"], source=source)
    for file in sorted(path.rglob("roofline.csv")) if path.is_dir() else [path.with_name("roofline.csv")]:
        if file.is_file():
            measured = rocm.read_rocprof_ceilings(file)["bytes_per_second"]
            if "hbm" in measured:
                return Ceilings(bytes_per_second=measured["hbm"], source=str(file))
    return None


def table(traffic: Traffic) -> list[list[Any]]:
    """A row per kernel or operator, with the columns of HEADER; None where ceilings, FLOPs or L2 bytes are not known."""
    rows: list[list[Any]] = []
    for row in traffic.rows:
        rate = row.bytes / row.seconds
        under_ceilings: list[Any] = [None] * 3
        if traffic.ceilings:
            bandwidth, bound = traffic.ceilings["bytes_per_second"], row.bound(traffic.ceilings)
            side = "compute" if bound > row.bytes / bandwidth else "memory"
            under_ceilings = [100 * rate / bandwidth, None if row.flops is None else side, 1e6 * (row.seconds - bound)]
        l2 = row.l2_bytes and row.l2_bytes / 1e6
        rows.append([row.name, row.calls, 1e6 * row.seconds, row.bytes / 1e6, rate / 1e9, *under_ceilings, l2])
    return rows


def facts(traffic: Traffic) -> list[tuple[str, str]]:
    """Origin and amount of the bytes, the share of the time that they need, and the rows near to and far from their bound."""
    total, seconds = sum(row.bytes for row in traffic.rows), sum(row.seconds for row in traffic.rows)
    of = "operators in a mean step" if traffic.bytes_are == MINIMUM else "kernels, all that was recorded"
    result = [
        ("bytes", f"{traffic.bytes_are}, from {traffic.path}"),
        ("total", f"{format_number(total / 1e6)} MB in {_time(seconds)} of {of}"),
    ]
    if traffic.ceilings:
        result += _against(traffic.ceilings, traffic, total, seconds)
    else:
        result.append(("bandwidth", f"not measured, so no percentages: {INPUT_HINT}"))
    return [*result, *(("note", note) for note in traffic.notes)]


def _against(ceilings: Ceilings, traffic: Traffic, total: float, seconds: float) -> list[tuple[str, str]]:
    bandwidth, short = ceilings["bytes_per_second"], kernel_names.short_name
    above = {row: row.seconds - row.bound(ceilings) for row in traffic.rows}
    near = [short(row.name) for row in traffic.rows if above[row] <= (1 - NEAR / 100) * row.seconds]
    far = ", ".join(f"{short(row.name)} {_time(above[row])}" for row in sorted(above, key=lambda row: -above[row])[:3])
    result = [
        ("bandwidth", f"{format_number(bandwidth / 1e9)} GB/s: {ceilings['source']}"),
        ("at least", f"{_needed(total, bandwidth, seconds)} of that time"),
        (f"near ({NEAR} %)", f"{len(near)} of {len(traffic.rows)}" + (f", the longest {', '.join(near[:3])}" if near else "")),
        ("far", f"most time above the bound: {far}"),
    ]
    if traffic.profile and not traffic.profile["attention_only"]:
        moved = sum(row.bytes for row in from_profile(traffic.profile)[0])
        timed = traffic.profile["run"]["step_ms"]
        step, how = timed["median"] / 1e3, "under" if timed["profiled"] >= len(timed["all"]) else "without"
        amount = f"moves {format_number(moved / 1e6)} MB at least, by its operators' shapes"
        result.append((
            "a step", f"{amount}: {_needed(moved, bandwidth, step)} of its {_time(step)} (median {how} the profiler)",
        ))  # fmt: skip
    return result


def _needed(moved: float, bandwidth: float, seconds: float) -> str:
    return f"{_time(moved / bandwidth)} at that bandwidth, {100 * moved / bandwidth / seconds:.3g} %"


def _time(seconds: float) -> str:
    return tables.format_time(1e3 * seconds)


def report(traffic: Traffic) -> Report:
    """The facts and the longest rows with short names; bandwidth.csv has all rows with full names and times in us."""
    result, rows = Report("Memory bandwidth"), table(traffic)
    result.facts(facts(traffic))
    unit, factor = tables.time_unit(max(row.seconds for row in traffic.rows) * 1e3)
    shown = [
        [kernel_names.short_name(name), calls, us * factor / 1e3, *rates, above and above * factor / 1e3, l2]
        for name, calls, us, *rates, above, l2 in rows
    ]
    header = [name.replace("us", unit) for name in HEADER]
    per_step = " in a step" if traffic.bytes_are == MINIMUM else ""
    title = f"The longest {min(TOP, len(rows))} of {len(rows)}, with all their calls{per_step}"
    result.table(*tables.filled(header, shown), title=title, code=["name"], top=TOP)
    result.csv("bandwidth", HEADER, rows)
    if traffic.ceilings:
        result.text(HOW_TO_READ)
    return result


def analyze(path: Path, folder: Path, draw_roofline: bool) -> str:
    """Writes bandwidth.csv and .md into `folder`, and roofline.png where asked for; returns the text for a terminal.

    Raises:
        UsageError: no source gives bytes, the data for the roofline is missing, or `folder` cannot be written to.
    """
    traffic = read(path)
    result = report(traffic)
    if draw_roofline:
        if not traffic.profile:
            raise UsageError(f"{path} holds no profile_*.json, which --generate-roofline-plot needs for FLOPs: {INPUT_HINT}")
        points, ceilings = roofline.from_profile(traffic.profile), traffic.profile["run"]["ceilings"]
        drawn = roofline.figure(points, ceilings, profile_summary.conditions(traffic.profile))
        result.figure(lambda: drawn, "roofline", "Roofline; bytes are the minimum by the operators' shapes")
    return result.publish(folder, "bandwidth")
