"""Memory traffic by kernel: bytes, bytes per second, how near that is to the measured bandwidth, and the time above the bound.

Bytes come from the best source there is in a folder that run_all_profilers.sh wrote (or in one file):

    ncu               measured: dram__bytes_read.sum + dram__bytes_write.sum (dram__bytes.sum); L2 traffic from lts__t_bytes.sum
    rocprof-compute   measured: requests of the L2 cache to memory, in pmc_perf.csv, times their size
    profile           a minimum: the shapes of the operators in profile_*.json, every tensor moved once (`operators.cost`)

A request is of 32, 64 or, reads on newer devices, 128 bytes. TCC_EA_RDREQ and TCC_EA_WRREQ (TCC_EA0_ from gfx942 on) count all
requests, RDREQ_32B the small reads, WRREQ_64B the large writes, TCC_BUBBLE on gfx942 the 128-byte reads, so there

    read      64 RDREQ + 64 BUBBLE - 32 RDREQ_32B
    written   32 WRREQ + 32 WRREQ_64B

gfx90a has no 128-byte reads. On gfx950 TCC_BUBBLE counts something else, and RDREQ_128B, _64B and _32B count reads by size, since
rocprof-compute 3.5. (AMD, "MI300 and MI200 Series performance counters and metrics", rocm.docs.amd.com; rocprof-compute's
metric "HBM Bandwidth" is this sum over the time.) The requests can also go to the host or another GPU.

The bandwidth is what a large copy reached in the profiled run, or HBM in rocprof-compute's roofline.csv; never a data sheet's.
With B bytes and, where the profile gives them, F FLOPs, a row takes at least max(B / bandwidth, F / peak): its bound. The rest
is time above the bound, largest where most can be gained.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.formulas import operators
from common.analysis.output import plots, tables
from common.analysis.profiles import kernel_names, kernel_table, load_kernels, rocm, step_profile
from common.analysis.reports import profile_summary, roofline
from common.errors import UsageError
from common.files import writable_folder, write_text

if TYPE_CHECKING:
    import pandas

TOP, NEAR = 20, 80  # rows in the tables; percent of the bound from which on a row counts as near it
WRITES = {"WRREQ_sum": 32, "WRREQ_64B_sum": 32}
GFX90A = {"RDREQ_sum": 64, "RDREQ_32B_sum": -32} | WRITES
GFX950 = {"RDREQ_128B_sum": 128, "RDREQ_64B_sum": 64, "RDREQ_32B_sum": 32} | WRITES
# By source and device: counters that add up to the bytes that memory moved, and the bytes that each count stands for.
COUNTERS: dict[str, dict[str, dict[str, int]]] = {
    "ncu": {
        "reads and writes apart": {"dram__bytes_read.sum": 1, "dram__bytes_write.sum": 1},
        "reads and writes together": {"dram__bytes.sum": 1},
    },
    "rocprof-compute": {
        "gfx942": {f"TCC_EA0_{name}": size for name, size in GFX90A.items()} | {"TCC_BUBBLE_sum": 64},
        "gfx90a": {f"TCC_EA_{name}": size for name, size in GFX90A.items()},
        "gfx950": {f"TCC_EA0_{name}": size for name, size in GFX950.items()},
    },
}
L2_BYTES = "lts__t_bytes.sum"
COMPUTING = "FLOPs were not counted, so matrix products and other kernels that compute can stay far from this bound without loss"
MEASURED, MINIMUM = "measured by counters", "a minimum: every tensor of an operator moved once"
WANTED = (
    "profile with `bash run_all_profilers.sh --enable-rocm-tools --profile-dir DIR`, which writes a profile_*.json and, where "
    "there is such a tool, counters of ncu or rocprof-compute"
)
READ = """A row takes at least its bytes at the bandwidth or, where they are known and that is longer, its FLOPs at the ceiling of
a GEMM. Below 0 us above that bound, data came from a cache, or the work ran in another precision than the GEMM."""


class Row(NamedTuple):
    """All calls of a kernel, or of an operator in one span: of a mean step, or of all that was recorded."""

    name: str
    calls: float
    seconds: float
    bytes: float
    flops: float | None = None
    l2_bytes: float | None = None

    def bound(self, ceilings: Mapping[str, Any]) -> float:
        """Seconds that these bytes and FLOPs take at least."""
        computing = self.flops / ceilings["flops_per_second"] if self.flops and "flops_per_second" in ceilings else 0.0
        return max(self.bytes / ceilings["bytes_per_second"], computing)


class Traffic(NamedTuple):
    """What was found.

    Attributes:
        rows: the longest first.
        bytes_are: MEASURED or MINIMUM.
        path: where the bytes come from.
        ceilings: bytes_per_second and `source`, with flops_per_second where a run measured them; None if nothing was measured.
        notes: what to know before reading the figures.
        profile: the newest profile_*.json, from which the rows are where the bytes are a MINIMUM: those of a mean step then.
    """

    rows: list[Row]
    bytes_are: str
    path: Path
    ceilings: dict[str, Any] | None
    notes: list[str]
    profile: dict[str, Any] | None


def counted_bytes(found: kernel_table.Kernels) -> "pandas.Series | str":
    """Bytes that memory moved, for each row of the table; if counters are missing, which."""
    system, formulas = found.path.with_name("sysinfo.csv"), dict(COUNTERS[found.source])  # rocprof-compute writes both
    if "TCC_EA0_RDREQ_128B_sum" in found.counters or (system.is_file() and "gfx950" in system.read_text(errors="replace")):
        del formulas["gfx942"]
    missing = {name: [counter for counter in formula if counter not in found.counters] for name, formula in formulas.items()}
    nearest = min(missing, key=lambda name: len(missing[name]) / len(formulas[name]))
    if missing[nearest]:
        return f"{', '.join(missing[nearest])} ({nearest})"
    return sum(size * found.counters[counter] for counter, size in formulas[nearest].items())


def from_counters(found: kernel_table.Kernels) -> list[Row] | str:
    """A row per kernel; if counters are missing, which."""
    moved = counted_bytes(found)
    if isinstance(moved, str):
        return moved
    launches = found.table.assign(bytes=moved, l2=found.counters.get(L2_BYTES, float("nan")))
    counted = launches[moved.notna() & (launches.duration_ns > 0)]
    added = counted.groupby("name")[["calls", "duration_ns", "bytes", "l2"]].sum(min_count=1)
    return [
        Row(name, int(calls), ns / 1e9, float(total), l2_bytes=None if l2 != l2 else float(l2))
        for name, calls, ns, total, l2 in added.itertuples()
    ]


def from_profile(profile: dict[str, Any]) -> tuple[list[Row], list[str]]:
    """A row per operator and span of a mean step, and what to know about them."""
    added: dict[str, Row] = {}
    unknown = whole = 0.0
    for row in operators.rows(profile):
        whole += row.us
        if row.bytes is None:
            unknown += row.us
        elif row.bytes:
            name = f"{row.name} ({row.span})"
            before = added.get(name, Row(name, 0.0, 0.0, 0.0, 0.0))
            work = (row.calls, row.us / 1e6, row.calls * row.bytes, row.calls * row.flops)
            added[name] = Row(name, *(old + new for old, new in zip(before[1:5], work, strict=True)))
    notes = ["only attention was kept"] if profile["attention_only"] else []
    if unknown:
        notes.append(
            f"left out, {100 * unknown / whole:.1f} % of the operators' time: operators whose bytes a trace does not say "
            "(code of torch.compile, an optimizer's operators on long lists of tensors)"
        )
    return list(added.values()), notes


def read(path: Path) -> Traffic:
    """What a folder or a file says about memory traffic.

    Raises:
        UsageError: there is nothing in it that says how many bytes were moved, or a file is damaged.
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
        notes += [*found.notes, COMPUTING]
        if left_out := len(found.table) - sum(row.calls for row in rows):
            notes.append(f"left out, {left_out} of {len(found.table)} launches: their bytes were not counted")
        return Traffic(_longest(rows), MEASURED, file, ceilings, notes, profile)
    if profile:
        rows, more = from_profile(profile)
        return Traffic(_longest(rows), MINIMUM, files["profile"][0], ceilings, notes + more, profile)
    raise UsageError(f"{'; '.join(notes) or f'nothing in {path} says how many bytes were moved'}: {WANTED}")


def _ceilings(path: Path, profile: dict[str, Any] | None) -> dict[str, Any] | None:
    """Those of the profiled run, else HBM's in a roofline.csv of rocprof-compute, in the folder or beside the file."""
    if profile and profile["run"]["ceilings"]:
        return profile["run"]["ceilings"] | {"source": "a large copy in the profiled run"}
    for file in sorted(path.rglob("roofline.csv")) if path.is_dir() else [path.with_name("roofline.csv")]:
        if file.is_file():
            measured = rocm.read_rocprof_ceilings(file)["bytes_per_second"]
            if "hbm" in measured:
                return {"bytes_per_second": measured["hbm"], "source": str(file)}
    return None


def _longest(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.seconds)


# ------------------------------------------------------------------------------------------------------------ what it says


def table(traffic: Traffic) -> tuple[list[str], list[list[Any]]]:
    """Header and a row per kernel or operator; None where there is no ceiling, or FLOPs or L2 traffic are not known."""
    header = ["name", "calls", "us", "MB", "GB/s", "% of copy", "bound by", "us above bound", "L2 MB"]
    rows = []
    for row in traffic.rows:
        rate, under_ceilings = row.bytes / row.seconds, [None] * 3
        if traffic.ceilings:
            bandwidth, bound = traffic.ceilings["bytes_per_second"], row.bound(traffic.ceilings)
            side = "compute" if bound > row.bytes / bandwidth else "memory"
            under_ceilings = [100 * rate / bandwidth, None if row.flops is None else side, 1e6 * (row.seconds - bound)]
        l2 = None if row.l2_bytes is None else row.l2_bytes / 1e6
        rows.append([row.name, row.calls, 1e6 * row.seconds, row.bytes / 1e6, rate / 1e9, *under_ceilings, l2])
    return header, rows


def facts(traffic: Traffic) -> list[tuple[str, str]]:
    """What the bytes are, how many in all, how much of the time they need at least, and what is near and far from that."""
    total, seconds = sum(row.bytes for row in traffic.rows), sum(row.seconds for row in traffic.rows)
    of = "operators in a mean step" if traffic.bytes_are == MINIMUM else "kernels, all that was recorded"
    result = [("bytes", f"{traffic.bytes_are}, from {traffic.path}"), ("in all", f"{_mb(total)} in {_ms(seconds)} of {of}")]
    if traffic.ceilings:
        result += _against_bandwidth(traffic, total, seconds)
    else:
        result.append(("bandwidth", f"not measured, so no percentages: {WANTED}"))
    return [*result, *(("note", note) for note in traffic.notes)]


def _against_bandwidth(traffic: Traffic, total: float, seconds: float) -> list[tuple[str, str]]:
    bandwidth, names = traffic.ceilings["bytes_per_second"], kernel_names.short_name
    above = {row: row.seconds - row.bound(traffic.ceilings) for row in traffic.rows}
    near = [names(row.name) for row in traffic.rows if above[row] <= (1 - NEAR / 100) * row.seconds]
    far = sorted(traffic.rows, key=lambda row: -above[row])[:3]
    result = [
        ("bandwidth", f"{tables.figure(bandwidth / 1e9)} GB/s: {traffic.ceilings['source']}"),
        ("at least", f"{_ms(total / bandwidth)} at that bandwidth, {100 * total / bandwidth / seconds:.3g} % of that time"),
        (f"near ({NEAR} %)", f"{len(near)} of {len(traffic.rows)}" + (f", the longest {', '.join(near[:3])}" if near else "")),
        ("far", "most time above the bound: " + ", ".join(f"{names(row.name)} {1e6 * above[row]:,.0f} us" for row in far)),
    ]
    if traffic.profile and not traffic.profile["attention_only"]:
        moved = sum(row.bytes for row in from_profile(traffic.profile)[0])
        timed = traffic.profile["run"]["step_ms"]
        step, how = timed["median"] / 1e3, "under" if timed["profiled"] >= len(timed["all"]) else "without"
        share = f"{_ms(moved / bandwidth)} at that bandwidth, {100 * moved / bandwidth / step:.3g} % of its {_ms(step)}"
        result.append(("a step", f"moves {_mb(moved)} at least, by its operators' shapes: {share} (median {how} the profiler)"))
    return result


def _mb(amount: float) -> str:
    return f"{tables.figure(amount / 1e6)} MB"


def _ms(seconds: float) -> str:
    return f"{tables.figure(1e3 * seconds)} ms"


def text(traffic: Traffic) -> str:
    """For a terminal."""
    return "\n".join([*(f"{fact:<12} {what}" for fact, what in facts(traffic)), *_shown(traffic, tables.text)])


def report(traffic: Traffic, drawn: bool) -> str:
    """The Markdown report."""
    picture = ["", "![Roofline; bytes are the minimum by the operators' shapes](roofline.png)"] if drawn else []
    lines = [f"- {fact}: {what}" for fact, what in facts(traffic)]
    return "\n".join(["# Memory bandwidth", "", *lines, *picture, *_shown(traffic, tables.markdown), ""])


def _shown(traffic: Traffic, as_table: Callable[..., str]) -> list[str]:
    """A heading, the first rows with short names and without the columns that are empty, and how to read them."""
    header, rows = table(traffic)
    rows = [[kernel_names.short_name(row[0]), *row[1:]] for row in rows[:TOP]]
    heading = f"longest {len(rows)} of {len(traffic.rows)}, all their calls{' in a step' if traffic.bytes_are == MINIMUM else ''}"
    body = as_table(*tables.filled(header, rows)).strip()
    return ["", heading, "", body, *(["", READ] if traffic.ceilings else [])]


def analyze(path: Path, folder: Path, draw_roofline: bool) -> str:
    """Writes bandwidth.csv (all rows, full names) and .md into `folder`, and roofline.png where asked for.

    Returns:
        The text for a terminal.

    Raises:
        UsageError: nothing says how many bytes were moved, the roofline needs what is not there, or `folder` cannot be written.
    """
    traffic, paths = read(path), [folder / "bandwidth.csv", folder / "bandwidth.md"]
    picture = None
    if draw_roofline:
        if not traffic.profile:
            raise UsageError(f"{path} holds no profile_*.json, which --generate-roofline-plot needs for FLOPs: {WANTED}")
        points, ceilings = roofline.from_profile(traffic.profile), traffic.profile["run"]["ceilings"]
        picture = roofline.figure(points, ceilings, profile_summary.conditions(traffic.profile))
        paths.append(folder / "roofline.png")
    writable_folder(folder, "--output-dir")
    write_text(paths[0], tables.csv_text(*table(traffic)))
    write_text(paths[1], report(traffic, bool(picture)))
    if picture:
        plots.save(picture, paths[2])
    return f"{text(traffic)}\n\nwritten: {', '.join(map(str, paths))}"
