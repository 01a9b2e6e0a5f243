"""Reads kernels and ceilings from files of AMD's profilers: CSV and rocpd databases of rocprofv3
and rocprof-compute.
"""

import os
import re
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import sqlite_file
from tracepage.readers.csv_table import numbers, read_frame
from tracepage.readers.source import SERIALIZED_NOTE, Source, make_source, several_gpus

import pandas

# Tables of rocprof-compute with the counters of all passes of a workload.
JOINED = ("pmc_perf.csv", "pmc_perf.csv.gz")
# A counter begins with the block of the GPU that counts.
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
# A kernel trace's: the number among all GPUs, and the process, of rocprofv3 and rocprofv2.
GPU_COLUMNS = ("Agent_Id", "Guid", "GPU_ID", "PID")
# A column of rocprofv2 that is no counter, in lower case.
ROCPROFV2_COLUMN = re.compile(
    r"(dispatch|gpu|queue|kernel|correlation|node)_id|guid|pid|tid|queue_index|grid_size"
    r"|workgroup_size|lds_per_workgroup|scratch_per_workitem|(arch|accum)_vgpr|sgpr|wave_size"
    r"|kernel_name|(start|end)_timestamp|dispatchns|completens|sig|obj"
)
# What is no kernel in a table of statistics: by the file's name, the names of copies, domains and
# calls that can stand alone, and names of one API, which begin alike (rocDecCreateDecoder).
OTHER_STATISTICS = re.compile(
    r"(.*[._])?(api|copy|memory|allocation|domain|hip|hsa)_stats\.csv(\.gz)?"
)
OTHER_NAME = re.compile(
    r"(__)?hip[A-Z]\w*|hsa_\w+|nccl[A-Z]\w*|[A-Z]+(_[A-Z0-9]+)+|(Mem)?[Cc]opy[A-Z]\w*To[A-Z]\w*"
)
CALL = re.compile(r"[a-z]+[A-Z]\w*")
API_PREFIX = 3  # letters
FLOPS_COLUMN = re.compile(r"(MFMA)?(BF|FP|F)(\d+)Flops")


def read_kernel_trace(path: Path) -> Source:
    return _trace("rocprofv3-kernel-trace", path, read_frame(path))


def read_rocprofv2(path: Path) -> Source:
    return _trace("rocprofv2-kernel-trace", path, read_frame(path))


def has_counters(columns: set[str]) -> bool:
    """Whether a table of launches of rocprofv2 or rocprof-compute has columns of counters."""
    names = [column.lower().replace("-", "_") for column in columns]
    return not all(map(ROCPROFV2_COLUMN.fullmatch, names))


def _trace(kind: str, path: Path, frame: pandas.DataFrame) -> Source:
    """A row per launch. Each process may see one GPU alone, which then has the same number in all
    of them.
    """
    columns = [column for column in GPU_COLUMNS if column in frame]
    gpus = len(frame[columns].drop_duplicates()) if columns else 1
    notes = several_gpus(gpus, "GPUs or processes")
    return make_source(kind, path, _launches(path, frame), notes=notes, gpus=gpus)


def is_of_kernels(path: Path) -> bool:
    """Whether a table of statistics is of kernels. Those of API calls, copies and markers have the
    same columns.
    """
    if OTHER_STATISTICS.fullmatch(path.name):
        return False
    names = list(read_frame(path)["Name"])
    if not names:
        return True
    if all(map(OTHER_NAME.fullmatch, names)):
        return False
    of_one_api = len(names) > 1 and len(os.path.commonprefix(names)) >= API_PREFIX
    named_kernels = "kernel_stats" in path.name
    return named_kernels or not (of_one_api and all(map(CALL.fullmatch, names)))


def read_kernel_stats(path: Path) -> Source:
    frame = read_frame(path)
    calls = numbers(path, frame, "Calls")
    total = numbers(path, frame, "TotalDurationNs")
    if (calls < 1).any():
        raise UsageError(f"{path} is damaged: row {int((calls < 1).argmax()) + 2} has no calls")
    columns = {"name": frame.Name, "calls": calls, "duration_ns": total}
    return make_source("rocprofv3-kernel-stats", path, columns)


def read_pmc_perf(path: Path) -> Source:
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
    return make_source(
        "rocprof-compute", path, launches, counters=counters, notes=(SERIALIZED_NOTE,)
    )


def _launches(path: Path, frame: pandas.DataFrame) -> dict[str, pandas.Series]:
    start = numbers(path, frame, "Start_Timestamp")
    end = numbers(path, frame, "End_Timestamp")
    if (end < start).any():
        row = int((end < start).argmax()) + 2
        raise UsageError(f"{path} is damaged: row {row} ends before it starts")
    return {"name": frame.Kernel_Name, "start_ns": start, "duration_ns": end - start}


def source_of_database(path: Path) -> str:
    """ "rocpd" if a SQLite database holds kernels and no counters of them, else a key of
    `load_kernels.REFUSALS`.
    """
    views = sqlite_file.tables(path)
    counters = (
        "SELECT 1 FROM rocpd_pmc_event P "
        "JOIN rocpd_kernel_dispatch K ON K.event_id = P.event_id LIMIT 1"
    )
    if "counters_collection" in views and sqlite_file.query(path, counters):
        return "counters of a pass"
    if "kernels" in views and sqlite_file.query(path, "SELECT 1 FROM kernels LIMIT 1"):
        return "rocpd"
    return "other"


def read_rocpd(path: Path) -> Source:
    columns = sqlite_file.columns(path, "kernels")
    agent = "agent_log_index" if "agent_log_index" in columns else "0"
    process = "guid" if "guid" in columns else "0"
    rows = sqlite_file.query(
        path, f'SELECT name, start, "end", {agent}, {process} FROM kernels ORDER BY start'
    )
    header = ["Kernel_Name", "Start_Timestamp", "End_Timestamp", *GPU_COLUMNS[:2]]
    return _trace("rocpd", path, pandas.DataFrame(rows, columns=header))


def read_rocprof_ceilings(path: Path) -> tuple[float, dict[str, float]]:
    """The ceilings that rocprof-compute measured on the first device in a roofline.csv (GB/s and
    GFLOP/s in the file): bytes/s of the memory, and FLOP/s by number format, `fp32`, `fp64`, ... of
    the vector units and `mfma_bf16`, ... of the matrix units.
    """
    if "HBMBw" not in files.read_text(path).partition("\n")[0]:
        raise UsageError(
            f"{path} is not a roofline.csv of rocprof-compute (it has no column HBMBw): "
            "profile with --roof-only"
        )
    frame = read_frame(path)
    if frame.empty:
        raise UsageError(f"{path} has a header and no device: profile with --roof-only again")
    flops = {}
    for column in frame.columns:
        match = FLOPS_COLUMN.fullmatch(column)
        if match:
            unit, kind, bits = match.groups()
            number_format = f"bf{bits}" if kind == "BF" else f"fp{bits}"
            name = f"mfma_{number_format}" if unit else number_format
            flops[name] = 1e9 * float(numbers(path, frame, column)[0])
    return 1e9 * float(numbers(path, frame, "HBMBw")[0]), flops
