"""Reads kernels and ceilings from files of AMD's profilers: CSV and rocpd databases of rocprofv3
and rocprof-compute.
"""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers.kernel_table import (
    SERIALIZED_NOTE,
    Kernels,
    build,
    numbers,
    read_frame,
    several_gpus,
)

import pandas

SQLITE = b"SQLite format 3\0"  # a database begins with it
# tables of rocprof-compute with the counters of all passes of a workload
JOINED = ("pmc_perf.csv", "pmc_perf.csv.gz")
# by the block of the GPU that counts
COUNTER = re.compile(r"(SQC?|TC[ACP]|T[AD]|GRBM|CP[CF]|SPI)_.*")
# Columns that tell launches apart where each counter has a row of its own: those by which
# rocprof-compute joins, and the GPU.
DISPATCH_COLUMNS = (
    "GPU_ID",
    "Dispatch_ID",
    "Kernel_Name",
    "Grid_Size",
    "Workgroup_Size",
    "LDS_Per_Workgroup",
)
GPU_COLUMNS = ("Agent_Id", "Guid")  # of a kernel trace: the number among all GPUs, and the process
FLOPS_COLUMN = re.compile(r"(MFMA)?(BF|FP|F)(\d+)Flops")


def read_kernel_trace(path: Path) -> Kernels:
    frame = read_frame(path)
    return build("rocprofv3-kernel-trace", path, _launches(path, frame), notes=_notes(frame))


def read_kernel_stats(path: Path) -> Kernels:
    frame = read_frame(path)
    calls = numbers(path, frame, "Calls")
    total = numbers(path, frame, "TotalDurationNs")
    if (calls < 1).any():
        raise UsageError(f"{path} is damaged: row {int((calls < 1).argmax()) + 2} has no calls")
    return build(
        "rocprofv3-kernel-stats", path, {"name": frame.Name, "calls": calls, "duration_ns": total}
    )


def read_pmc_perf(path: Path) -> Kernels:
    """A row per launch with a column per counter, or since rocprof-compute 3.5 a row per launch and
    counter.
    """
    frame = read_frame(path)
    launches = _launches(path, frame)
    if "Counter_Name" in frame:
        frame["Counter_Value"] = numbers(path, frame, "Counter_Value", gaps=True)
        keys = [column for column in DISPATCH_COLUMNS if column in frame]
        first = ~frame.duplicated(keys)
        by_launch = frame.groupby([*keys, "Counter_Name"]).Counter_Value.last().unstack()
        counters = by_launch.reindex(
            pandas.MultiIndex.from_frame(frame.loc[first, keys])
        ).reset_index(drop=True)
        launches = {name: column[first] for name, column in launches.items()}
    else:
        columns = [column for column in frame.columns if COUNTER.fullmatch(column)]
        counters = pandas.DataFrame(
            {column: numbers(path, frame, column, gaps=True) for column in columns},
            index=frame.index,
        )
    counters = counters.dropna(axis="columns", how="all")
    return build("rocprof-compute", path, launches, counters, notes=(SERIALIZED_NOTE,))


def _launches(path: Path, frame: pandas.DataFrame) -> dict[str, pandas.Series]:
    start, end = (numbers(path, frame, column) for column in ("Start_Timestamp", "End_Timestamp"))
    if (end < start).any():
        raise UsageError(
            f"{path} is damaged: row {int((end < start).argmax()) + 2} ends before it starts"
        )
    return {"name": frame.Kernel_Name, "start_ns": start, "duration_ns": end - start}


def source_of_database(path: Path) -> str:
    """ "rocpd" if a SQLite database holds kernels and no counters of them, else a key of REFUSALS."""
    views = {name for (name,) in _query(path, "SELECT name FROM sqlite_master WHERE type = 'view'")}
    counted = "SELECT 1 FROM rocpd_pmc_event P JOIN rocpd_kernel_dispatch K ON K.event_id = P.event_id LIMIT 1"
    if "counters_collection" in views and _query(path, counted):
        return "counters of a pass"
    return (
        "rocpd" if "kernels" in views and _query(path, "SELECT 1 FROM kernels LIMIT 1") else "other"
    )


def read_rocpd(path: Path) -> Kernels:
    columns = [name for _, name, *_ in _query(path, "PRAGMA table_info(kernels)")]
    agent, process = (name if name in columns else "0" for name in ("agent_log_index", "guid"))
    rows = _query(
        path, f'SELECT name, start, "end", {agent}, {process} FROM kernels ORDER BY start'
    )
    frame = pandas.DataFrame(
        rows, columns=["Kernel_Name", "Start_Timestamp", "End_Timestamp", *GPU_COLUMNS]
    )
    return build("rocpd", path, _launches(path, frame), notes=_notes(frame))


def _notes(frame: pandas.DataFrame) -> tuple[str, ...]:
    """Each process may see one GPU alone, which then has the same number in all of them."""
    columns = [column for column in GPU_COLUMNS if column in frame]
    return several_gpus(len(frame.drop_duplicates(columns)), "GPUs or processes") if columns else ()


def _query(path: Path, sql: str) -> list[tuple]:
    """Rows of a SQLite database, which is opened read-only."""
    try:
        with (
            files.opened(path),
            closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database,
        ):
            return database.execute(sql).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"{path} is not a database of rocpd, or is damaged: {error}") from error


def read_rocprof_ceilings(path: Path) -> tuple[float, dict[str, float]]:
    """The ceilings that rocprof-compute measured on the first device in a roofline.csv (GB/s and
    GFLOP/s in the file): bytes/s of the memory, and FLOP/s by number format, `fp32`, `fp64`, ... of
    the vector units and `mfma_bf16`, ... of the matrix units.
    """
    if "HBMBw" not in files.read_text(path).partition("\n")[0]:
        raise UsageError(
            f"{path} is not a roofline.csv of rocprof-compute (it has no column HBMBw): profile with --roof-only"
        )
    frame = read_frame(path)
    if not len(frame):
        raise UsageError(f"{path} has a header and no device: profile with --roof-only again")
    flops = {}
    for column in frame.columns:
        if match := FLOPS_COLUMN.fullmatch(column):
            unit, kind, bits = match.groups("")
            flops[f"{unit and 'mfma_'}{'bf' if kind == 'BF' else 'fp'}{bits}"] = 1e9 * float(
                numbers(path, frame, column)[0]
            )
    return 1e9 * float(numbers(path, frame, "HBMBw")[0]), flops
