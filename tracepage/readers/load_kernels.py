"""Detects which profiler wrote a file and loads it once, as a `Source`. `load` takes a file or a
folder from any of these kinds of source:

    a row per launch
        rocprofv3-kernel-trace   *_kernel_trace.csv of rocprofv3, or of `rocpd convert`
        rocpd                    *_results.db of rocprofv3: SQLite, view `kernels`
        rocprofv2-kernel-trace   results_*.csv of rocprofv2 without counters
        pytorch-trace            Chrome trace of torch.profiler (.json, .json.gz)
        nsys                     database of `nsys export --type sqlite`
        nsys-gpu-trace           `nsys stats --report cuda_gpu_trace --format csv`
    a row per kernel name
        rocprofv3-kernel-stats   *_kernel_stats.csv of rocprofv3 --stats
        nsys-kernel-sum          `nsys stats --report cuda_gpu_kern_sum --format csv`
        profile                  our profile_*.json
    a row per launch, and counters
        ncu                      `ncu --csv`, details page or `--page raw`
        rocprof-compute          pmc_perf.csv of a workload, since release 3.9 .csv.gz

The content of a file decides, not its name. If a folder holds several sources, the first in this
order is loaded, because it has the best record of how the launches follow each other. The last two
kinds run every kernel alone, several times, to read its counters, so the time between their
kernels is not the program's. Since release 3.6.0 of rocprof-compute, pmc_perf.csv is written by
`rocprof-compute analyze`, from the tables or databases of the passes.
"""

import codecs
import csv
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import ncu, nsys, pytorch, rocm, sqlite_file
from tracepage.readers.chrome_trace import not_a_trace
from tracepage.readers.source import OTHER_TRACE, Source
from tracepage.records import step_profile

READERS: dict[str, Callable[[Path], Source]] = {
    "rocprofv3-kernel-trace": rocm.read_kernel_trace,
    "rocpd": rocm.read_rocpd,
    "rocprofv2-kernel-trace": rocm.read_rocprofv2,
    "pytorch-trace": pytorch.read_trace,
    "nsys": nsys.read_database,
    "nsys-gpu-trace": nsys.read_gpu_trace,
    "rocprofv3-kernel-stats": rocm.read_kernel_stats,
    "nsys-kernel-sum": nsys.read_kernel_sum,
    "profile": pytorch.read_profile,
    "ncu": ncu.read_ncu,
    "rocprof-compute": rocm.read_pmc_perf,
}
SUFFIXES = (
    ".csv",
    ".csv.gz",
    ".json",
    ".json.gz",
    ".db",
    ".sqlite",
)  # Other files in a folder stay closed.
HEAD_BYTES = 1 << 20
DAMAGED = "damaged files"
NO_ROWS = "has no rows: nothing ran on a GPU while it was recorded, or it is cut off"
ZSTD = b"\x28\xb5\x2f\xfd"  # A packed file begins with it.
NSYS_TEXT = re.compile(r"Time ?\(%\)\s+Total Time \(|Start \(\w+\)\s+Duration \(\w+\)")
NSYS_KINDS = ("nsys-gpu-trace", "nsys-kernel-sum", "nsys table")  # The first in a file is read.
NSYS_REPORTS = (".nsys-rep", ".qdrep")
NSYS_TABLES = "--report cuda_gpu_trace (or cuda_gpu_kern_sum) --format csv"

SUPPORTED_FILES_HINT = (
    "a PyTorch trace (.json, .json.gz), a profile_*.json, *_kernel_trace.csv, *_kernel_stats.csv "
    "or *_results.db of rocprofv3, pmc_perf.csv of rocprof-compute, the output of ncu --csv, "
    "or the .sqlite of nsys export"
)
FOREIGN = f"is none of the files that hold kernels: give {SUPPORTED_FILES_HINT}"
# Other files: what would be taken for launches, and what a profiler writes beside the file that
# holds kernels.
REFUSALS = {
    "empty": "is empty",
    "other": FOREIGN,
    "zstd": f"is packed by zstd (unpack it with `zstd -d`), so it {FOREIGN}",
    "UTF-16": f"is UTF-16, as PowerShell redirects output (save it as UTF-8), so it {FOREIGN}",
    "nsys report": "is nsys's own form: give what `nsys export --type sqlite {}` writes",
    "nsys table": f"is a table of nsys without kernels: give that of `nsys stats {NSYS_TABLES}`",
    "nsys text": f"is a table of nsys as text: give that of `nsys stats {NSYS_TABLES}`",
    "rocprofv3 JSON": (
        "is JSON of rocprofv3: profile with --output-format csv and give the *_kernel_trace.csv"
    ),
    "API statistics": (
        "holds statistics of API calls or copies, not of kernels: "
        "give the *_kernel_stats.csv beside it"
    ),
    "counters": (
        "has a row per counter of rocprofv3 --pmc: "
        "give the *_kernel_trace.csv (rocprofv3 --kernel-trace)"
    ),
    "counters of a pass": (
        "is one pass of rocprof-compute: "
        "run `rocprof-compute analyze -p FOLDER`, give the pmc_perf.csv"
    ),
}
JSON_MARKS = {
    "rocprofiler-sdk-tool": "rocprofv3 JSON",
    step_profile.SCHEMA: "profile",
    "traceEvents": "pytorch-trace",
}
# Columns that tell the CSV files of AMD's and NVIDIA's tools apart; the first row whose columns are
# all in a file decides.
TIMES = {"Start_Timestamp", "End_Timestamp"}
CSV_KINDS: tuple[tuple[set[str], str], ...] = (
    ({"Kernel_Name", "Dispatch_ID", "GPU_ID", *TIMES}, "rocprof-compute"),
    ({"Kernel_Name", "Counter_Name"}, "counters"),
    ({"Kernel_Name", *TIMES}, "rocprofv3-kernel-trace"),
    ({"Name", "Calls", "TotalDurationNs"}, "rocprofv3-kernel-stats"),
    (set(), "other"),
)


def load(path: Path, any_trace: bool = False) -> Source:
    """Loads a file, the newest file of the best source in a folder, or one of those that rocprofv3
    writes for `-o path`. In all but the first case a note says what was not read.

    With `any_trace` it may be a Chrome trace of any program. UsageError names the file and the
    reason.
    """
    notes = []
    if not path.exists():
        missing = path
        path = _written_for(path)
        notes.append(
            f"there is no {missing}: took {path}, since rocprofv3 adds to the name given with -o"
        )
    if path.is_dir():
        kind, path, *left_out = _best(path)
        notes += left_out
    else:
        kind = recognize(path)
    if kind in REFUSALS:
        raise UsageError(f"{path} {REFUSALS[kind].format(path)}")
    source = READERS[kind](path)
    is_other = source.kind == OTHER_TRACE
    if is_other and not any_trace:
        raise not_a_trace(path)
    if source.table.empty:
        raise UsageError(
            f"{path} holds no timed event" if is_other else f"{path} ({kind}) {NO_ROWS}"
        )
    return replace(source, notes=(*notes, *source.notes))


def find(folder: Path) -> dict[str, list[Path]]:
    """The files with kernels in a folder and below it, by source in the order of READERS, newest
    first.

    The newest profile of ours is the one whose name sorts last; the newest of other files is the
    one that was written last. In a workload of rocprof-compute only pmc_perf.csv counts. Damaged
    files come last, under `damaged files`; if there is nothing else, the error of one is raised.
    """
    files_by_kind: dict[str, list[Path]] = {kind: [] for kind in (*READERS, DAMAGED)}
    reason: UsageError | None = None
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or _gave_spans(path) or not path.name.endswith(SUFFIXES) or not path.is_file():
            continue
        try:
            kind = recognize(path)
        except UsageError as error:
            kind = DAMAGED
            reason = error
        if kind in files_by_kind and not _is_pass(path, kind):
            files_by_kind[kind].append(path)
    if reason and not any(files_by_kind[kind] for kind in READERS):
        raise reason
    for kind, paths in files_by_kind.items():
        if kind == "profile":
            paths.sort(key=lambda path: (path.name, path), reverse=True)
        else:
            paths.sort(key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)
    return {kind: paths for kind, paths in files_by_kind.items() if paths}


def _is_pass(path: Path, kind: str) -> bool:
    """Whether it is a table of a workload of rocprof-compute that another one holds too."""
    joined = [path.with_name(name) for name in rocm.JOINED]
    if kind == "rocprof-compute":
        return path not in joined
    return kind == "rocprofv2-kernel-trace" and any(map(Path.exists, joined))


def _gave_spans(path: Path) -> bool:
    """Whether it is the eager trace of a captured one beside it."""
    captured = path.with_name(path.name.removeprefix("eager_"))
    return captured != path and captured.exists()


def _best(folder: Path) -> tuple:
    """Kind and path of the file that `load` takes, and a note if there are others."""
    files_by_kind = find(folder)
    if not files_by_kind:
        for path in sorted(folder.rglob("*")):
            if path.suffix in NSYS_REPORTS:
                raise UsageError(f"{path} {REFUSALS['nsys report'].format(path)}")
        raise UsageError(
            f"{folder} holds no kernels: looked in it and below for {SUPPORTED_FILES_HINT}"
        )
    (kind, (path, *older)), *more = files_by_kind.items()
    others = [f"{len(paths)} of {name}" for name, paths in more]
    if older:
        others.insert(0, f"{len(older)} other of {kind} (each process has its own)")
    if not others:
        return kind, path
    return kind, path, f"not read in {folder}: {', '.join(others)}"


def _written_for(path: Path) -> Path:
    """The file that rocprofv3 wrote for `-o path`, beside it or in the folder of a host."""
    for end in ("kernel_trace.csv", "kernel_stats.csv", "results.db"):
        for name in (f"{path.name}_{end}", f"{path.stem}_{end}"):
            for candidate in (path.with_name(name), *sorted(path.parent.glob(f"*/{name}"))):
                if candidate.is_file():
                    return candidate
    raise UsageError(
        f"{path} does not exist: give {SUPPORTED_FILES_HINT}, or a folder that holds some"
    )


def recognize(path: Path) -> str:
    """A key of READERS or of REFUSALS."""
    with files.opened(path) as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(sqlite_file.SQLITE):
        return "nsys" if nsys.is_export(path) else rocm.source_of_database(path)
    if head.startswith(ZSTD):
        return "zstd"
    is_utf16 = head.startswith(files.UTF16)
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not head:
        return "empty"
    if b"\0" in head and not is_utf16:
        return "nsys report" if path.suffix in NSYS_REPORTS else "other"
    if head[:1] in (b"{", b"["):
        return _kind_of_json(path, head[:1] == b"[")
    text = files.read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return "UTF-16"
    nsys_tables = nsys.tables(text)
    if nsys_tables:
        return next(kind for kind in NSYS_KINDS if kind in nsys_tables)
    if NSYS_TEXT.search(text[:HEAD_BYTES]):
        return "nsys text"
    match = ncu.HEADER.search(text)
    if match:
        return "other" if "Invocations" in match[0] else "ncu"  # A summary has no launches.
    first_line = text.lstrip().split("\n", 1)[0]
    columns = set(next(csv.reader([first_line[: csv.field_size_limit()]])))
    kind = next(kind for needed, kind in CSV_KINDS if needed <= columns)
    if kind == "rocprofv3-kernel-stats" and not rocm.is_of_kernels(path):
        return "API statistics"
    if kind == "rocprof-compute" and not rocm.has_counters(columns):
        return "rocprofv2-kernel-trace"
    return kind


def _kind_of_json(path: Path, is_list: bool) -> str:
    """A key of READERS or of REFUSALS, by the first of JSON_MARKS in a file; metadata of any length
    can stand before it.
    """
    marks = JSON_MARKS | ({"ph": "pytorch-trace"} if is_list else {})
    before = b""
    with files.opened(path) as file:
        for chunk in iter(functools.partial(file.read, HEAD_BYTES), b""):
            text = before + chunk
            for mark, kind in marks.items():
                if f'"{mark}"'.encode() in text:
                    return kind
            before = chunk[-len(max(marks, key=len)) :]
    return "other"
