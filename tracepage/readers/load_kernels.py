"""Detects which profiler wrote a file and loads its kernels. `load` takes a file or a folder from
any of these sources:

    rocprofv3-kernel-trace   *_kernel_trace.csv of rocprofv3, or of `rocpd convert`       a row per launch
    rocpd                    *_results.db of rocprofv3: SQLite, view `kernels`            a row per launch
    pytorch-trace            Chrome trace of torch.profiler (.json, .json.gz)             a row per launch
    rocprofv3-kernel-stats   *_kernel_stats.csv of rocprofv3 --stats                      a row per kernel name
    profile                  our profile_*.json                                           a row per kernel name
    ncu                      `ncu --csv`, details page or `--page raw`                    a row per launch, counters
    rocprof-compute          pmc_perf.csv of a workload, since release 3.9 .csv.gz        a row per launch, counters

The content of a file decides, not its name. If a folder holds several sources, the first in this
order is loaded, because it has the best record of how the launches follow each other. The last two
sources run every kernel alone, several times, to read its counters, so the time between their
kernels is not the program's. Since release 3.6.0 of rocprof-compute, pmc_perf.csv is written by
`rocprof-compute analyze`, from the tables or databases of the passes.
"""

import codecs
import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import ncu, pytorch, rocm
from tracepage.readers.kernel_table import Kernels, read_frame
from tracepage.records import step_profile

READERS: dict[str, Callable[[Path], Kernels]] = {
    "rocprofv3-kernel-trace": rocm.read_kernel_trace,
    "rocpd": rocm.read_rocpd,
    "pytorch-trace": pytorch.read_trace,
    "rocprofv3-kernel-stats": rocm.read_kernel_stats,
    "profile": pytorch.read_profile,
    "ncu": ncu.read,
    "rocprof-compute": rocm.read_pmc_perf,
}
# of the files in a folder that are opened
SUFFIXES = (".csv", ".csv.gz", ".json", ".json.gz", ".db")
HEAD_BYTES = 1 << 20
DAMAGED = "damaged files"
NO_ROWS = "has no rows: nothing ran on a GPU while it was recorded, or it is cut off"
# names of API calls, copies or domains
API_NAME = re.compile(r"(__)?hip[A-Z]\w*|hsa_\w+|nccl[A-Z]\w*|[A-Z]+(_[A-Z0-9]+)+")

SUPPORTED_FILES_HINT = (
    "a PyTorch trace (.json, .json.gz), a profile_*.json, *_kernel_trace.csv, *_kernel_stats.csv or *_results.db of rocprofv3, "
    "pmc_perf.csv of rocprof-compute, or the output of ncu --csv"
)
FOREIGN = f"is none of the files that hold kernels: give {SUPPORTED_FILES_HINT}"
# Other files: what would be taken for launches, and what a profiler writes beside the file that
# holds kernels.
REFUSALS = {
    "empty": "is empty",
    "other": FOREIGN,
    "rocprofv3 JSON": "is JSON of rocprofv3: profile with --output-format csv and give the *_kernel_trace.csv",
    "API statistics": "holds statistics of API calls or copies, not of kernels: give the *_kernel_stats.csv beside it",
    "counters": "has a row per counter of rocprofv3 --pmc: give the *_kernel_trace.csv (rocprofv3 --kernel-trace)",
    "counters of a pass": "is one pass of rocprof-compute: run `rocprof-compute analyze -p FOLDER`, give the pmc_perf.csv",
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


def load(path: Path) -> Kernels:
    """Loads the kernels of a file, of the newest file of the best source in a folder, or of the
    files that rocprofv3 writes for `-o path`. In all but the first case a note says what was not
    read. UsageError names the file and the reason.
    """
    notes = []
    if not path.exists():
        given = path
        path = _written_for(path)
        notes.append(
            f"there is no {given}: took {path}, since rocprofv3 adds to the name given with -o"
        )
    if path.is_dir():
        folder = path
        found = find(path)
        if not found:
            raise UsageError(
                f"{folder} holds no kernels: looked in it and below for {SUPPORTED_FILES_HINT}"
            )
        source, candidates = next(iter(found.items()))
        path = candidates[0]
        others = (
            [f"{len(candidates) - 1} other of {source} (each process has its own)"]
            if candidates[1:]
            else []
        )
        others += [f"{len(more)} of {name}" for name, more in list(found.items())[1:]]
        notes += [f"not read in {folder}: {', '.join(others)}"] if others else []
    else:
        source = recognize(path)
    if source in REFUSALS:
        raise UsageError(f"{path} {REFUSALS[source]}")
    kernels = READERS[source](path)
    if not len(kernels.table):
        raise UsageError(f"{path} ({source}) {NO_ROWS}")
    return replace(kernels, notes=(*notes, *kernels.notes))


def find(folder: Path) -> dict[str, list[Path]]:
    """The files with kernels in a folder and below it, by source in the order of READERS, newest
    first.

    The newest profile of ours is the one whose name sorts last; the newest of other files is the
    one that was written last. In a workload of rocprof-compute only pmc_perf.csv counts. Damaged
    files come last, under `damaged files`; if there is nothing else, the error of one is raised.
    """
    found: dict[str, list[tuple]] = {source: [] for source in (*READERS, DAMAGED)}
    reason: UsageError | None = None
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        # gave the spans
        eager = (
            path.name.startswith("eager_")
            and path.with_name(path.name.removeprefix("eager_")).exists()
        )
        if hidden or eager or not path.name.endswith(SUFFIXES) or not path.is_file():
            continue
        try:
            source = recognize(path)
        except UsageError as error:
            source = DAMAGED
            reason = error
        if source in found and (source != "rocprof-compute" or path.name in rocm.JOINED):
            found[source].append(
                (path.name if source == "profile" else path.stat().st_mtime_ns, path)
            )
    if reason and not any(found[source] for source in READERS):
        raise reason
    return {
        source: [path for _, path in sorted(each, reverse=True)]
        for source, each in found.items()
        if each
    }


def _written_for(path: Path) -> Path:
    """The file that rocprofv3 wrote for `-o path`, beside it or in the folder of a host."""
    names = [
        f"{name}_{end}"
        for end in ("kernel_trace.csv", "kernel_stats.csv", "results.db")
        for name in (path.name, path.stem)
    ]
    for name in names:
        for found in (path.with_name(name), *sorted(path.parent.glob(f"*/{name}"))):
            if found.is_file():
                return found
    raise UsageError(
        f"{path} does not exist: give {SUPPORTED_FILES_HINT}, or a folder that holds some"
    )


def recognize(path: Path) -> str:
    """A key of READERS or of REFUSALS."""
    with files.opened(path) as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(rocm.SQLITE):
        return rocm.source_of_database(path)
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if b"\0" in head or not head:
        return "other" if head else "empty"
    if head[:1] in (b"{", b"["):
        marks = JSON_MARKS | ({"ph": "pytorch-trace"} if head[:1] == b"[" else {})
        return next(
            (source for mark, source in marks.items() if f'"{mark}"'.encode() in head), "other"
        )
    text = files.read_text(path)
    if match := ncu.HEADER.search(text):
        return "other" if "Invocations" in match[0] else "ncu"  # a summary has no launches
    first_line = text.lstrip().split("\n", 1)[0]
    columns = set(next(csv.reader([first_line[: csv.field_size_limit()]])))
    source = next(source for needed, source in CSV_KINDS if needed <= columns)
    # API calls, copies and markers, which can have any name, have the same columns
    if source == "rocprofv3-kernel-stats":
        names = list(read_frame(path).Name)
        all_api = bool(names) and all(API_NAME.fullmatch(name) for name in names)
        source = (
            "API statistics" if all_api or path.name.endswith("_marker_api_stats.csv") else source
        )
    return source
