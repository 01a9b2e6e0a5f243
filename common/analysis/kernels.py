"""One table of kernels, whichever profiler saw them, and what it says about launches.

`load` takes a file of any of these sources, or a folder of them, and goes by what is in a file, not by its name:

    rocprofv3-kernel-trace   *_kernel_trace.csv of rocprofv3, or of `rocpd convert`       a row per launch
    rocpd                    *_results.db of rocprofv3: SQLite, view `kernels`            a row per launch
    pytorch-trace            Chrome trace of torch.profiler (.json, .json.gz)             a row per launch
    rocprofv3-kernel-stats   *_kernel_stats.csv of rocprofv3 --stats                      a row per kernel name
    profile                  our profile_*.json                                           a row per kernel name
    ncu                      `ncu --csv`, details page or `--page raw`                    a row per launch, counters
    rocprof-compute          pmc_perf.csv of a workload                                   a row per launch, counters

Of several in a folder the first in this order is taken: it is the one that says most about how the launches follow each
other. The last two run every kernel alone, several times, to read its counters, so the time between their kernels is their own.

A PyTorch trace of a CPU has no kernels. Its rows are operator calls that do work (category `operator`, with their self time):
what would be one launch each on a GPU. From a trace that marks steps only what belongs to a step is kept, as in a profile.
"""

import csv
import io
import json
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis import operators, profile_report, tables, traces
from common.errors import UsageError
from common.files import writable_folder, write_text

if TYPE_CHECKING:
    import pandas

SHORT_NS = 10_000  # a launch costs the host some us: below this, the GPU may be waiting for the next one
COLUMNS = ("name", "category", "start_ns", "duration_ns", "calls", "min_ns", "max_ns")
SUFFIXES = (".csv", ".json", ".json.gz", ".db")  # what is opened in a folder
HEAD_BYTES = 1 << 20
NAME_WIDTH = 70

TRACE_COLUMNS = {"Kernel_Name", "Start_Timestamp", "End_Timestamp"}
STATS_COLUMNS = {"Name", "Calls", "TotalDurationNs"}
API_NAME = re.compile(r"(__)?hip[A-Z]\w*|hsa_\w+|nccl[A-Z]\w*|[A-Z]+(_[A-Z0-9]+)+")  # of calls, copies or domains, not of kernels
KINDS = {"gpu_memcpy": "memcpy", "gpu_memset": "memset"}  # of torch.profiler
COPY, FILL = re.compile(r"Memcpy|__amd_rocclr_copyBuffer"), re.compile(r"Memset|__amd_rocclr_fillBuffer")
# Columns of pmc_perf.csv that say which launch a row is; the passes that were joined repeat some with a number.
LAUNCH_COLUMN = re.compile(
    r"(dispatch_id|gpu_id|queue.id|queue.index|pid|tid|grid_size|workgroup_size|lds_per_workgroup|scratch_per_workitem|arch_vgpr|"
    r"accum_vgpr|sgpr|wave_size|sig|obj|kernel_name|(start|end)_timestamp|dispatchns|completens|correlation_id|xcc_index)(_\d+)?",
    re.IGNORECASE,
)
NCU_HEADER = re.compile(r'^("?ID"?,)?"?Process ID"?,.*"?Kernel Name"?,.*$', re.MULTILINE)
NCU_KEY = ("Process ID", "ID", "Kernel Name")  # of a launch
NCU_LAUNCH = {*NCU_KEY, "Context", "Stream", "Device", "CC"}  # columns that are no metric, though some are numbers
NCU_NS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
NCU_PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
CEILING = re.compile(r"(?P<unit>MFMA|WMMA)?(?P<kind>BF|FP|F|I)(?P<bits>\d+(F\d+)?)(Flops|Ops)|(?P<level>[A-Z]+\d?)Bw")
PLAIN_ARGUMENTS = re.compile(r"(?<=<)((\d+u?l?|true|false|bool|char|int|long|float|double|Half|BFloat16|unsigned \w+), )+")
COMPILER_FRAMES = ("TorchDynamo", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher")  # of torch.compile: no work

WANTED = (
    "a PyTorch trace (.json, .json.gz), a profile_*.json, *_kernel_trace.csv, *_kernel_stats.csv or *_results.db of rocprofv3, "
    "pmc_perf.csv of rocprof-compute, or the output of ncu --csv"
)
# What else a file can be, and what to do about it.
REFUSED = {
    "empty": "is empty",
    "binary": f"is binary, and none of the files that hold kernels: give {WANTED}",
    "ncu report": "is a report of ncu: export it with `ncu --import FILE --page raw --csv > kernels.csv`",
    "damaged": "is a damaged gzip file",
    "compressed": "is compressed, and no trace: unpack it first (gunzip)",
    "database": "is a SQLite database, but not one of rocpd (no view `kernels`): give a *_results.db of rocprofv3",
    "rocprofv3 JSON": "is JSON of rocprofv3: profile with --output-format csv and give the *_kernel_trace.csv",
    "JSON": f"is JSON, but neither a trace (no traceEvents) nor a profile: give {WANTED}",
    "API statistics": "holds statistics of API calls or copies, not of kernels: give the *_kernel_stats.csv beside it",
    "API trace": "holds API calls, copies or allocations, not kernels: give the *_kernel_trace.csv (rocprofv3 --kernel-trace)",
    "counters": "has a row per counter of rocprofv3 --pmc: give the *_kernel_trace.csv (rocprofv3 --kernel-trace)",
    "ceilings": "holds measured ceilings, not kernels: give the pmc_perf.csv beside it",
    "rocprof v1": "is of rocprof, before rocprofv3: profile with `rocprofv3 --kernel-trace --output-format csv --`",
    "ncu summary": "is a summary of ncu, without launches: leave --print-summary out",
    "ncu log": "is output of ncu without a table: profile with --csv, and look for ==ERROR== in it",
    "text": f"is none of the files that hold kernels: give {WANTED}",
}
ONE_BY_ONE = "counters are collected kernel by kernel, so the time between kernels is the profiler's: no busy share"
NCU_CLOCK = "ncu fixes the clocks and flushes the caches by default: its times can be longer than in a run"
OPERATORS = "a CPU launches no kernels: these are operator calls that do work, with their self time"
COMPILED = "a CPU trace has no events for the loops that torch.compile fuses: their time is in the CompiledFunction around them"


@dataclass(frozen=True)
class Kernels:
    """What one file says.

    Attributes:
        table: pandas DataFrame, a row per launch, or per kernel name where the source has only sums (`start_ns` is NaN then):
            name (in full), category (`kernel`, `memcpy`, `memset` or `operator`), start_ns (after the first start in the file),
            duration_ns (of all calls of the row), calls, min_ns and max_ns (of one call; NaN where the source does not say).
        counters: a column per counter of the source, rows as in `table`; no columns where it has none. Those of ncu are in
            ns, byte, byte/s and hz, without prefixes.
        source: a key of READERS.
        path: the file that was read.
        steps: training steps that the rows are from; None if the source does not say.
        notes: what to know before reading the figures.
    """

    table: "pandas.DataFrame"
    counters: "pandas.DataFrame"
    source: str
    path: Path
    steps: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def are_operators(self) -> bool:
        return bool((self.table.category == "operator").any())


def load(path: Path) -> Kernels:
    """Reads a file, or of a folder the newest file of the first source that is in it.

    A file that does not exist stands for the one that `rocprofv3 -o FILE` writes instead (FILE_kernel_trace.csv and so on).

    Raises:
        UsageError: there is nothing to read, or it is damaged, or holds no kernels.
    """
    notes = []
    if not path.exists():
        given, path = path, _written_for(path)
        notes.append(f"there is no {given}: took {path}, since rocprofv3 adds to the name given with -o")
    if path.is_dir():
        folder, found = path, find(path)
        if not found:
            raise UsageError(f"{folder} holds no kernels: looked in it and below for {WANTED}")
        source, files = next(iter(found.items()))
        path = files[0]
        others = [f"{len(files) - 1} older of {source}"] if files[1:] else []
        others += [f"{len(more)} of {name}" for name, more in list(found.items())[1:]]
        notes += [f"not read in {folder}: {', '.join(others)}"] if others else []
    else:
        source = _recognise(path)
    if source in REFUSED:
        raise UsageError(f"{path} {REFUSED[source]}")
    kernels = READERS[source](path)
    if not len(kernels.table):
        raise UsageError(f"{path} ({source}) has no rows: nothing ran on a GPU while it was recorded, or it is cut off")
    return replace(kernels, notes=(*notes, *kernels.notes))


def find(folder: Path) -> dict[str, list[Path]]:
    """The files with kernels in a folder and below it, by source in the order of READERS, newest first.

    The newest of our own profiles is the one whose name sorts last, of all others the one that was written last. Of a
    rocprof-compute workload only pmc_perf.csv counts, not the passes that it was joined from.
    """
    found: dict[str, list[tuple]] = {source: [] for source in READERS}
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        source = _recognise(path) if path.name.endswith(SUFFIXES) and path.is_file() and not hidden else ""
        if source in READERS and (source != "rocprof-compute" or path.name == "pmc_perf.csv"):
            found[source].append((path.name if source == "profile" else path.stat().st_mtime_ns, path))
    return {source: [path for _, path in sorted(files, reverse=True)] for source, files in found.items() if files}


def _written_for(path: Path) -> Path:
    """What rocprofv3 wrote for `-o path`, beside it or in the folder of a host."""
    folders = [path.parent, *sorted(folder for folder in path.parent.glob("*") if folder.is_dir())]
    for end in ("kernel_trace.csv", "kernel_stats.csv", "results.db"):
        for folder in folders:
            for name in (path.name, path.stem):
                if (folder / f"{name}_{end}").is_file():
                    return folder / f"{name}_{end}"
    raise UsageError(f"{path} does not exist: give {WANTED}, or a folder that holds some")


# ------------------------------------------------------------------------------------------------------- what a file is


def _recognise(path: Path) -> str:
    """A key of READERS or of REFUSED, by the content of a file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if head.startswith(b"SQLite format 3\0"):
        return "rocpd" if _query(path, "SELECT 1 FROM sqlite_master WHERE type = 'view' AND name = 'kernels'") else "database"
    if head.startswith(b"NVR\0"):
        return "ncu report"
    if head.startswith(b"\x1f\x8b"):
        return _recognise_compressed(head)
    if b"\0" in head:
        return "binary"
    if not head.strip():
        return "empty"
    return _recognise_json(head) or _recognise_csv(path)


def _recognise_compressed(head: bytes) -> str:
    try:
        return _recognise_json(zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)) or "compressed"
    except zlib.error:
        return "damaged"


def _recognise_json(head: bytes) -> str | None:
    if head.lstrip()[:1] not in (b"{", b"["):
        return None
    if b'"rocprofiler-sdk-tool"' in head:
        return "rocprofv3 JSON"
    if f'"{profile_report.SCHEMA}"'.encode() in head:
        return "profile"
    return "pytorch-trace" if b'"traceEvents"' in head else "JSON"


def _recognise_csv(path: Path) -> str:
    text = _text(path)
    if match := NCU_HEADER.search(text):
        return "ncu summary" if "Invocations" in match[0] else "ncu"
    if "==PROF==" in text or "==ERROR==" in text:
        return "ncu log"
    first_line = text.lstrip().split("\n", 1)[0]
    columns = set(next(csv.reader([first_line[: csv.field_size_limit()]])))
    if columns >= TRACE_COLUMNS | {"Dispatch_ID", "GPU_ID"}:
        return "rocprof-compute"
    if columns >= {"Kernel_Name", "Counter_Name"}:
        return "counters"
    if columns >= TRACE_COLUMNS:
        return "rocprofv3-kernel-trace"
    if columns >= {"Start_Timestamp", "End_Timestamp"}:
        return "API trace"
    if columns >= STATS_COLUMNS:
        names = list(_csv(path).Name)
        all_api = bool(names) and all(API_NAME.fullmatch(name) for name in names)
        marked = path.name.endswith("_marker_api_stats.csv")  # whose names can be anything
        return "API statistics" if all_api or marked else "rocprofv3-kernel-stats"
    if columns >= {"KernelName", "BeginNs", "EndNs"}:
        return "rocprof v1"
    return "ceilings" if "HBMBw" in columns else "text"


# -------------------------------------------------------------------------------------------------------------- reading


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _rows(path: Path, text: str) -> list[list[str]]:
    """Header and rows of a table, all of one length; blank lines are left out, and ncu's own lines, which begin with `==`."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row and not row[0].startswith("==")]
    except csv.Error as error:
        raise UsageError(f"{path} is cut off or damaged: {error}") from error
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise UsageError(f"{path} is cut off or damaged: row {number} has {len(row)} fields, the header {len(rows[0])}")
    return rows


def _csv(path: Path) -> "pandas.DataFrame":
    """A CSV file as text, a column for each of its own."""
    import pandas

    header, *rows = _rows(path, _text(path))
    return pandas.DataFrame(rows, columns=header)


def _numbers(path: Path, frame: "pandas.DataFrame", column: str) -> "pandas.Series":
    import pandas

    numbers = pandas.to_numeric(frame[column], errors="coerce")
    if numbers.isna().any():
        wrong = int(numbers.isna().argmax())
        raise UsageError(f"{path} is damaged: {column} in row {wrong + 2} is no number: {frame[column][wrong]!r}")
    return numbers


def _kernels(source: str, path: Path, columns: dict[str, Any], counters: "pandas.DataFrame | None" = None, **rest) -> Kernels:
    """Fills in the columns that a source leaves out: one call a row, and a single call is its own shortest and longest."""
    import pandas

    given = {column: list(values) for column, values in columns.items()}
    table = pandas.DataFrame({"calls": 1, "start_ns": float("nan")} | given)
    table["start_ns"] -= table.start_ns.min()  # while they are whole numbers: nanoseconds of a clock can exceed a double
    if "category" not in table:
        table["category"] = [_category(name) for name in table.name]
    for column in ("min_ns", "max_ns"):
        if column not in table:
            table[column] = table.duration_ns.where(table.calls == 1)
    types = dict.fromkeys(("start_ns", "duration_ns", "min_ns", "max_ns"), float) | {"calls": int}
    counters = pandas.DataFrame(index=table.index) if counters is None else counters
    return Kernels(table[list(COLUMNS)].astype(types), counters, source, path, **rest)


def _category(name: str) -> str:
    return "memcpy" if COPY.match(name) else "memset" if FILL.match(name) else "kernel"


def _times(path: Path, frame: "pandas.DataFrame") -> dict[str, "pandas.Series"]:
    start, end = (_numbers(path, frame, column) for column in ("Start_Timestamp", "End_Timestamp"))
    if (end < start).any():
        raise UsageError(f"{path} is damaged: row {int((end < start).argmax()) + 2} ends before it starts")
    return {"name": frame.Kernel_Name, "start_ns": start, "duration_ns": end - start}


def _read_kernel_trace(path: Path) -> Kernels:
    return _kernels("rocprofv3-kernel-trace", path, _times(path, _csv(path)))


def _read_kernel_stats(path: Path) -> Kernels:
    frame = _csv(path)
    own = {"calls": "Calls", "duration_ns": "TotalDurationNs", "min_ns": "MinNs", "max_ns": "MaxNs"}
    columns = {ours: _numbers(path, frame, column) for ours, column in own.items() if column in frame}
    return _kernels("rocprofv3-kernel-stats", path, {"name": frame.Name, **columns})


def _read_pmc_perf(path: Path) -> Kernels:
    import pandas

    frame = _csv(path)
    counters = frame[[column for column in frame if not LAUNCH_COLUMN.fullmatch(column)]]
    counters = counters.apply(pandas.to_numeric, errors="coerce").dropna(axis="columns", how="all")
    return _kernels("rocprof-compute", path, _times(path, frame), counters, notes=(ONE_BY_ONE,))


def _query(path: Path, sql: str) -> list[tuple]:
    """Rows of a SQLite database, which is not written to."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return database.execute(sql).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"{path} is not a database of rocpd, or is damaged: {error}") from error


def _read_rocpd(path: Path) -> Kernels:
    rows = _query(path, "SELECT name, start, duration FROM kernels ORDER BY start")
    return _kernels("rocpd", path, _columns(("name", "start_ns", "duration_ns"), rows))


def _columns(names: Sequence[str], rows: Sequence[Sequence]) -> dict[str, list]:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _read_trace(path: Path) -> Kernels:
    trace = traces.load(path)
    on_gpu, steps = len(trace.kernels) > 0, len(trace.steps) or None
    frame = trace.kernels if on_gpu else trace.operators
    frame = frame[frame.step >= 0] if steps else frame
    if on_gpu:
        category = [KINDS.get(kind) or _category(name) for kind, name in zip(frame.category, frame.name, strict=True)]
        own, notes = frame.duration_us, ()
    else:
        calls = list(zip(frame.name, frame.input_shapes, frame.input_types, strict=True))
        working = {call for call in set(calls) if _works(*call)}
        frame = frame[[call in working for call in calls]]
        category, own, notes = ["operator"] * len(frame), frame.self_cpu_us, _cpu_notes(frame.name)
    times = {"start_ns": (frame.start_us * 1e3).round(), "duration_ns": (own * 1e3).round()}
    return _kernels("pytorch-trace", path, {"name": frame.name, "category": category, **times}, steps=steps, notes=notes)


def _works(name: str, shapes: str, types: str) -> bool:
    """Whether an operator computes or moves something; views, allocation, autograd's nodes and torch.compile's frames do not."""
    if name in operators.COMPOSITE_ON_CPU or name.startswith(COMPILER_FRAMES):
        return False
    return operators.cost(name, json.loads(shapes), json.loads(types)) != (0, 0)


def _cpu_notes(names: Iterable[str]) -> tuple[str, ...]:
    return (OPERATORS, COMPILED) if any(name.startswith("CompiledFunction") for name in names) else (OPERATORS,)


def _read_profile(path: Path) -> Kernels:
    profile = profile_report.read(path)
    steps, on_gpu = profile["profiled_steps"], bool(profile["kernels"])
    if on_gpu:
        rows = [(kernel["name"], kernel["calls"], kernel["device_us"]) for kernel in profile["kernels"]]
    else:
        working = [row for row in operators.rows(profile) if row.works and not row.name.startswith(COMPILER_FRAMES)]
        rows = [(row.name, round(row.calls * steps), row.us * steps) for row in working]
    added: dict[str, tuple[int, float]] = {}
    for name, calls, us in rows:
        calls_before, us_before = added.get(name, (0, 0.0))
        added[name] = calls_before + calls, us_before + us
    rows = [(name, _category(name) if on_gpu else "operator", calls, round(us * 1e3)) for name, (calls, us) in added.items()]
    notes = (*(() if on_gpu else _cpu_notes(added)), *(("only attention was kept",) if profile["attention_only"] else ()))
    columns = _columns(("name", "category", "calls", "duration_ns"), rows)
    return _kernels("profile", path, columns, steps=steps, notes=notes)


def _read_ncu(path: Path) -> Kernels:
    import pandas

    text = _text(path)
    header, *rows = _rows(path, text[NCU_HEADER.search(text).start() :])
    launches: dict[tuple, dict[str, float]] = {}  # in the order of the file
    for launch, metric, value in (_ncu_details if "Metric Name" in header else _ncu_raw)(path, header, rows):
        launches.setdefault(launch, {})[metric] = value
    counters = pandas.DataFrame(list(launches.values())).dropna(axis="columns", how="all")
    durations = counters.filter(regex=r"^Duration \(ns\)$|^gpu__time_duration\.")
    if launches and (not len(durations.columns) or durations.iloc[:, 0].isna().any()):
        raise UsageError(f"{path} has launches without a duration: add gpu__time_duration.sum to ncu --metrics")
    columns = {"name": [name for *_, name in launches], "duration_ns": durations.iloc[:, 0] if launches else []}
    return _kernels("ncu", path, columns, counters, notes=(ONE_BY_ONE, NCU_CLOCK))


def _ncu_details(path: Path, header: list[str], rows: list[list[str]]) -> Iterator[tuple[tuple, str, float]]:
    """(launch, metric, value) of each row. Labels get their unit: `Memory Throughput` is listed in % and in byte/s."""
    where = [header.index(name) for name in NCU_KEY]
    metric, value, unit = (header.index(name) for name in ("Metric Name", "Metric Value", "Metric Unit"))
    for row in rows:
        if row[metric]:  # the others are ncu's advice
            number, base = _ncu_value(row[value], row[unit])
            label = row[metric] if "__" in row[metric] or not base else f"{row[metric]} ({base})"
            yield tuple(row[column] for column in where), label, number


def _ncu_raw(path: Path, header: list[str], rows: list[list[str]]) -> Iterator[tuple[tuple, str, float]]:
    """(launch, metric, value) of each cell; the row below the header holds the units."""
    where = [header.index(name) for name in NCU_KEY]
    for row in rows[1:]:
        if rows[0][where[1]]:
            raise UsageError(f"{path} has no row of units below its header: export it again with ncu --page raw --csv")
        for name, cell, unit in zip(header, row, rows[0], strict=True):
            if name not in NCU_LAUNCH:
                yield tuple(row[column] for column in where), name, _ncu_value(cell, unit)[0]


def _ncu_value(text: str, unit: str) -> tuple[float, str]:
    """A metric in its base unit, and that unit; NaN for text.

    Thousands are apart, as in `1,234.5`; in `12 (3; 9)` the instances follow the value.
    """
    base, factor = ("ns", NCU_NS[unit]) if unit in NCU_NS else (unit, 1.0)
    if unit[:1] in NCU_PREFIX:
        base, factor = unit[1:], NCU_PREFIX[unit[:1]]
    try:
        number = float(text.split(" (")[0].replace(",", ""))
    except ValueError:
        number = float("nan")
    return number * factor, base.replace("/second", "/s")


READERS: dict[str, Callable[[Path], Kernels]] = {
    "rocprofv3-kernel-trace": _read_kernel_trace,
    "rocpd": _read_rocpd,
    "pytorch-trace": _read_trace,
    "rocprofv3-kernel-stats": _read_kernel_stats,
    "profile": _read_profile,
    "ncu": _read_ncu,
    "rocprof-compute": _read_pmc_perf,
}


# ------------------------------------------------------------------------------------------------------------ what it says


class Row(NamedTuple):
    """All calls of one kernel; min_ns and max_ns of one call are None where the source has only sums."""

    name: str
    category: str
    calls: int
    total_ns: float
    mean_ns: float
    min_ns: float | None
    max_ns: float | None
    share: float  # of the time of all kernels, 0 to 1


def summary(kernels: Kernels) -> list[Row]:
    """A row per kernel name, the longest total first."""
    grouped = kernels.table.groupby(["name", "category"], sort=False)
    added = grouped.agg(calls=("calls", "sum"), total=("duration_ns", "sum"), low=("min_ns", "min"), high=("max_ns", "max"))
    whole = added.total.sum() or 1.0
    rows = [
        Row(*key, int(calls), total, total / calls, None if low != low else low, None if high != high else high, total / whole)
        for key, calls, total, low, high in zip(added.index, added.calls, added.total, added.low, added.high, strict=True)
    ]
    return sorted(rows, key=lambda row: -row.total_ns)


class Gaps(NamedTuple):
    """From the first start to the last end: window_ns = busy_ns (at least one kernel runs) + the sum of idle_ns."""

    window_ns: float
    busy_ns: float
    idle_ns: "Any"  # numpy array: each time between kernels in which none runs, in order


def gaps(kernels: Kernels) -> Gaps | None:
    """Time between consecutive kernels; None without starts, or where counters were collected, kernel by kernel.

    Kernels that overlap, on several queues, streams or devices in one file, count once: busy is the union of their intervals.
    """
    import numpy

    table = kernels.table.sort_values("start_ns")
    if table.start_ns.isna().any() or ONE_BY_ONE in kernels.notes:
        return None
    starts = table.start_ns.to_numpy()
    ends = numpy.maximum.accumulate(starts + table.duration_ns.to_numpy())
    between = starts[1:] - ends[:-1]
    idle, window = between[between > 0], ends[-1] - starts[0]
    return Gaps(float(window), float(window - idle.sum()), idle)


def short_name(name: str, width: int = NAME_WIDTH) -> str:
    """A kernel's name for a table; the data keeps the full one.

    Return type, namespaces, parameters and leading template arguments that are numbers or plain types are left out, so that
    what tells PyTorch's kernels from each other fits into `width`: `elementwise_kernel<BinaryFunctor<MulFunctor<float>>>`.
    """
    name = re.sub(r" [\[(](clone )?\.kd[\])]$|\.kd$|\(anonymous namespace\)::|<unnamed>::", "", name)
    start = depth = 0
    for i, character in enumerate(name):
        if character == "(" and not depth and name[i - 1 : i] not in ("", " "):  # the parameters
            name = PLAIN_ARGUMENTS.sub("", re.sub(r"\b[A-Za-z_]\w*::", "", name[start:i])).replace(" >", ">")
            break
        if character == " " and not depth:
            start = i + 1
        depth += (character in "<(") - (character in ">)")
    return name if len(name) <= width else name[: width - 3] + "..."


def text(kernels: Kernels, rows: list[Row], top: int) -> str:
    """What was read, how many launches, how long and how busy, how many are short, and the `top` first of `rows`."""
    on_cpu, table = kernels.are_operators, kernels.table
    calls, total = int(table.calls.sum()), table.duration_ns.sum()
    per_step = f", {calls / kernels.steps:,.0f} a step (steps: {kernels.steps})" if kernels.steps else ""
    kinds = [f"{kind} {count:,}" for kind, count in table.groupby("category", sort=False).calls.sum().items()]
    facts = [
        ("source", f"{kernels.source}, {kernels.path}"),
        *(("note", note) for note in kernels.notes),
        ("operator calls" if on_cpu else "launches", f"{calls:,}{per_step}" + (f"; {', '.join(kinds)}" if kinds[1:] else "")),
        ("distinct", f"{len(rows)} {'operators' if on_cpu else 'kernels'}"),
        ("total time", f"{total / 1e6:,.3f} ms"),
        ("busy", _busy(kernels)),
        (f"under {SHORT_NS / 1e3:.0f} us", _short(table, calls, total)),
    ]
    header = ["operator" if on_cpu else "kernel", "calls", "total us", "mean us", "min us", "max us", "share %"]
    body = [
        [short_name(row.name), row.calls, *(None if ns is None else ns / 1e3 for ns in row[3:7]), 100 * row.share]
        for row in rows[:top]
    ]
    lines = [f"{fact:<15} {figures}" for fact, figures in facts]
    return "\n".join([*lines, "", f"longest {len(body)} of {len(rows)}", tables.text(header, body)])


def _busy(kernels: Kernels) -> str:
    found = gaps(kernels)
    if found is None:
        why = "see the note" if ONE_BY_ONE in kernels.notes else "this source has sums, and no times at which kernels start"
        return f"left out: {why}"
    share = 100 * found.busy_ns / found.window_ns if found.window_ns else 100.0
    line = f"{share:.1f} % of {found.window_ns / 1e6:,.3f} ms from the first start to the last end; gaps: {len(found.idle_ns):,}"
    if not len(found.idle_ns):
        return line
    median, longest = sorted(found.idle_ns)[len(found.idle_ns) // 2], max(found.idle_ns)
    return f"{line}, median {median / 1e3:,.1f} us, longest {longest / 1e3:,.1f} us"


def _short(table: "pandas.DataFrame", calls: int, total: float) -> str:
    """Calls under SHORT_NS. Where a row holds many calls, all count by their mean."""
    short = table[table.duration_ns < SHORT_NS * table.calls]
    count, time = int(short.calls.sum()), short.duration_ns.sum()
    by_mean = "" if (table.calls == 1).all() else ", by the mean of each kernel"
    shares = f"{100 * count / calls:.1f} % of them, {100 * time / (total or 1):.1f} % of the time"
    return f"{count:,}: {shares}{by_mean} (launch-bound candidates)"


def analyze(trace_file: Path, top: int, csv_out: Path | None) -> str:
    """The text for a terminal; writes every kernel into `csv_out`, with its full name and times in ns.

    Raises:
        UsageError: there are no kernels in `trace_file`, or `csv_out` cannot be written.
    """
    kernels = load(trace_file)
    rows = summary(kernels)
    result = text(kernels, rows, top)
    if csv_out is None:
        return result
    if csv_out.is_dir():
        raise UsageError(f"--csv-out: {csv_out} is a folder: name a file in it")
    writable_folder(csv_out.parent, "--csv-out")
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    write_text(csv_out, lines.getvalue())
    return f"{result}\n\n{csv_out}"


# ----------------------------------------------------------------------------------------------- ceilings of rocprof-compute


def read_rocprof_ceilings(path: Path) -> dict[str, Any]:
    """What rocprof-compute measured a device to do at best: the first one in a roofline.csv (GB/s and GFLOP/s in the file).

    Returns:
        device: its number.
        flops_per_second: `fp32`, `fp64`, ... of the vector units, `mfma_bf16`, `mfma_fp16`, ... (or `wmma_`) of the matrix
            units; operations per second for `int8` and its like.
        bytes_per_second: `hbm`, `l2`, `l1`, `lds`, `mall`.

    Raises:
        UsageError: the file is not such a table, or is damaged.
    """
    if _recognise(path) != "ceilings":
        raise UsageError(f"{path} is no roofline.csv of rocprof-compute (it has no column HBMBw): profile with --roof-only")
    frame = _csv(path)
    if not len(frame):
        raise UsageError(f"{path} has a header and no device: profile with --roof-only again")
    result: dict[str, Any] = {"device": int(_numbers(path, frame, frame.columns[0])[0])}
    result |= {"flops_per_second": {}, "bytes_per_second": {}}
    for column in frame:
        match = CEILING.fullmatch(column)
        value = float(_numbers(path, frame, column)[0]) * 1e9 if match else 0.0
        if value and match["level"]:
            result["bytes_per_second"][match["level"].lower()] = value
        elif value:
            kind = {"BF": "bf", "I": "int"}.get(match["kind"], "fp") + match["bits"].lower()
            result["flops_per_second"]["_".join(filter(None, ((match["unit"] or "").lower(), kind)))] = value
    return result
