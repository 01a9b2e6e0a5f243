"""Files of profilers that hold kernels: fixtures, and files that a test writes. All hold the same
three launches.
"""

import json
import os
import sqlite3
from pathlib import Path

from tests.conftest import ROOT
from tests.small_traces import gpu_trace
from tracepage.readers.source import Source

FIXTURES = ROOT / "tests" / "fixtures" / "kernels"

SCALE, COPY = "void scale<float>(float*, float, int)", "__amd_rocclr_copyBuffer"
# name, start, duration in ns
LAUNCHES = [(SCALE, 0, 4000), (COPY, 3000, 13000), (SCALE, 20001, 1000)]
CLOCK = 1_900_000_000_000_000_007  # the first start: beyond what a double resolves to a nanosecond
TRACE = (FIXTURES / "new_kernel_trace.csv").read_text().rstrip()
STATS_HEADER = (
    '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\n'
)
STATS = (
    STATS_HEADER
    + f'"{SCALE}",2,5000,2500.0,27.78,1000,4000,2121.3\n"{COPY}",1,13000,13000.0,72.22,13000,13000,0.0\n'
)


def write_database(path: Path, launches: list[tuple] = LAUNCHES, view: bool = True) -> Path:
    """A database with the part of rocpd's schema that kernels come from: tables with a uuid in
    their name, views without.
    """
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE rocpd_kernel_dispatch_0000aaaa (kernel_id, start INTEGER, [end] INTEGER)"
        )
        database.execute("CREATE TABLE rocpd_info_kernel_symbol_0000aaaa (id, display_name TEXT)")
        names = list(dict.fromkeys(name for name, _, _ in launches))
        database.executemany(
            "INSERT INTO rocpd_info_kernel_symbol_0000aaaa VALUES (?, ?)", enumerate(names)
        )
        rows = [
            (names.index(name), CLOCK + start, CLOCK + start + duration)
            for name, start, duration in launches
        ]
        database.executemany("INSERT INTO rocpd_kernel_dispatch_0000aaaa VALUES (?, ?, ?)", rows)
        if view:
            database.execute(
                "CREATE VIEW kernels AS SELECT S.display_name AS name, K.start, K.[end], (K.[end] - K.start) AS duration "
                "FROM rocpd_kernel_dispatch_0000aaaa K JOIN rocpd_info_kernel_symbol_0000aaaa S ON S.id = K.kernel_id"
            )
    database.close()
    return path


def write_gpu_trace(path: Path, launch: str = "cudaLaunchKernel") -> Path:
    path.write_text(json.dumps(gpu_trace(launch)))
    return path


def put(path: Path, content: bytes | str, age: float = 0) -> Path:
    """Writes a file that was last written `age` seconds before the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def launch_rows(found: Source) -> list[tuple]:
    return list(found.table[["name", "start_ns", "duration_ns"]].itertuples(index=False, name=None))
