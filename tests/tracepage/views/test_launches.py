"""Kernel launches: totals by name, gaps between kernels, short launches, and the script that
reports them.
"""

import csv
import re

from tests.conftest import ROOT
from tests.kernel_files import COPY, FIXTURES, LAUNCHES, SCALE, TRACE, put, write_database
from tracepage.readers import load_kernels
from tracepage.views import launches

import pytest

SCRIPT = ROOT / "version2_pytorch_fused" / "analyze_kernel_launches.py"


@pytest.mark.parametrize(
    "rows, window, busy, idle",
    [
        (LAUNCHES, 21001, 17000, 4001),  # the first two overlap by 1000 ns
        (
            [("long", 0, 100), ("inside", 10, 20), ("inside", 50, 10), ("after", 150, 10)],
            160,
            110,
            50,
        ),
        # after 1, 2 and 3 ns
        (
            [("first", 0, 100), ("next", 101, 99), ("last", 202, 98), ("later", 303, 97)],
            400,
            397,
            3,
        ),
    ],
    ids=["an overlap", "beside a longer one", "below the error of the clock"],
)
def test_gaps_are_where_no_kernel_runs(tmp_path, rows, window, busy, idle):
    found = launches.gaps(load_kernels.load(write_database(tmp_path / "results.db", rows)))
    assert (found.window_ns, found.busy_ns, list(found.idle_ns)) == (window, busy, [idle])


def test_summary_adds_up_by_name():
    rows = launches.summary(load_kernels.load(FIXTURES / "new_kernel_trace.csv"))
    assert list(rows.itertuples(index=False, name=None)) == [
        (COPY, "memcpy", 1, 13000, 13000, 13000 / 18000),
        (SCALE, "kernel", 2, 5000, 2500, 5000 / 18000),
    ]


def facts(output: str) -> dict[str, str]:
    """The lines between the verdict and the table, by their labels."""
    lines = re.sub("\n +", " ", output.split("\n\n")[2]).splitlines()
    return dict(re.split(" {2,}", line, maxsplit=1) for line in lines)


def test_script_reports_a_kernel_trace(tmp_path, execute):
    put(tmp_path / "results.csv_kernel_trace.csv", TRACE)
    shown = execute(
        SCRIPT, "--trace-file", "results.csv", "--csv-out", "tables/launches.csv", "--top", 1
    ).out
    found = facts(shown)
    verdict = " ".join(shown.split("\n\n")[1].split())
    assert "4 us of the 21 us in the file (19 %)" in verdict
    assert found["source"] == "rocprofv3-kernel-trace, results.csv_kernel_trace.csv"
    assert found["note"].startswith("there is no results.csv: took results.csv_kernel_trace.csv")
    assert (
        found["launches"] == "3; kernel 2, memcpy 1"
        and found["total time"] == "18 us; median of one 4 us"
    )
    assert (
        found["busy"].startswith("80.9 % of 21 us")
        and "gaps: 1, median 4 us, longest 4 us" in found["busy"]
    )
    assert found["under 10 us"].startswith("2: 66.7 % of them, 27.8 % of the time")
    assert "Kernels that take longest, 1 of 2" in shown and COPY in shown
    assert found["of no known kind"] == "28 % of the time, most of it in scale<float>"
    with (tmp_path / "tables/launches.csv").open(newline="") as file:
        rows = [(row["name"], row["calls"], row["total_ns"]) for row in csv.DictReader(file)]
    assert rows == [(COPY, "1", "13000.0"), (SCALE, "2", "5000.0")], (
        "all kernels, with their full names"
    )


def test_a_missing_file_is_one_line(refused):
    assert "missing.csv does not exist: give " in refused(SCRIPT, "--trace-file", "missing.csv")
