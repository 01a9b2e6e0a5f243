"""Detection of a profiler's file by its content, the choice of a file in a folder, and one line for
what holds no kernels.
"""

import json
import os

from tests.kernel_files import (
    FIXTURES,
    STATS,
    STATS_HEADER,
    TRACE,
    put,
    write_database,
)
from tests.small_traces import rank_trace
from tracepage.errors import UsageError
from tracepage.readers import load_kernels

import pytest

DETAILS = (FIXTURES / "ncu_details.csv").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TRACE[:-20], r"cut off or damaged: row 4 has \d+ fields, the header 22"),
        (TRACE.replace("1900000000000004007", "19"), "row 2 ends before it starts"),
        (
            STATS_HEADER
            + '"hipMemcpy",3,9,3.0,100.0,1,5,1.0\n"__hipPushCallConfiguration",1,1,1.0,0.0,1,1,0.0\n',
            "API calls",
        ),
        (
            "Time (%),Total Time (ns),Num Calls,Name\n60.0,600,2,cudaMalloc\n",
            "is a table of nsys without kernels: give that of `nsys stats --report cuda_gpu_trace",
        ),
        (b"SQLite format 3\0" + b"x" * 100, "is not a SQLite database, or is damaged"),
        ('{"schema": "tiny-llama-run/1"}', "is none of the files that hold kernels"),
        (DETAILS.replace('"Duration"', '"Elapsed"'), "without a duration"),
    ],
    ids=lambda value: "content" if isinstance(value, bytes) or len(value) > 200 else None,
)
def test_what_holds_no_kernels_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "given.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message) as error:
        load_kernels.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["new_kernel_trace.csv", "ncu_raw.csv", "pmc_perf_long.csv"])
def test_a_table_with_the_line_ends_of_another_system_is_read(tmp_path, name):
    lines = (FIXTURES / name).read_text().splitlines()
    (tmp_path / name).write_bytes("\r".join(lines).encode())
    table = load_kernels.load(tmp_path / name).table
    assert table.equals(load_kernels.load(FIXTURES / name).table)


def test_a_folder_gives_the_newest_run_of_its_best_source(tmp_path):
    put(tmp_path / "workloads/v2/MI300A_A1/pmc_perf.csv", (FIXTURES / "pmc_perf.csv").read_bytes())
    put(
        tmp_path / "workloads/v2/MI300A_A1/SQ_LEVEL_WAVES.csv",
        (FIXTURES / "pmc_perf.csv").read_bytes(),
    )
    put(tmp_path / "workloads/v2/MI300A_A1/roofline.csv", "device,HBMBw\n0,1\n")
    put(tmp_path / "metrics_v2.json", '{"schema": "tiny-llama-run/1"}')
    put(tmp_path / "notes.txt", TRACE)
    assert load_kernels.find(tmp_path) == {
        "rocprof-compute": [tmp_path / "workloads/v2/MI300A_A1/pmc_perf.csv"]
    }

    stats = put(tmp_path / "host/1_kernel_stats.csv", STATS)
    assert load_kernels.load(tmp_path).path == stats
    assert any(
        "not read" in note and "1 of rocprof-compute" in note
        for note in load_kernels.load(tmp_path).notes
    )
    database = write_database(tmp_path / "host" / "7_results.db")
    assert load_kernels.load(tmp_path).path == database
    old = put(tmp_path / "host/9_kernel_trace.csv", TRACE, age=60)
    new = put(tmp_path / "host/3_kernel_trace.csv", TRACE)
    put(tmp_path / ".venv/lib/5_kernel_trace.csv", TRACE, age=-60)
    found = load_kernels.load(tmp_path)
    assert found.path == new and any(
        "1 other of rocprofv3-kernel-trace (each" in note for note in found.notes
    )
    assert any("own), 1 of rocpd" in note for note in found.notes)
    os.utime(old)
    assert load_kernels.load(tmp_path).path == old


def test_a_damaged_file_stops_a_folder_only_if_it_is_alone(tmp_path):
    damaged = put(tmp_path / "7_results.db", b"SQLite format 3\0" + b"x" * 100)
    with pytest.raises(UsageError, match=rf"{damaged} is not a SQLite database, or is damaged"):
        load_kernels.load(tmp_path)
    put(tmp_path / "1_kernel_trace.csv", b"\xef\xbb\xbf" + TRACE.encode())
    assert any("1 of damaged files" in note for note in load_kernels.load(tmp_path).notes)


def test_the_eager_trace_of_a_captured_run_is_not_the_run(tmp_path):
    for name, age in (("trace_1.json", 60), ("eager_trace_1.json", 0)):
        put(tmp_path / name, json.dumps(rank_trace(0)), age=age)
    assert load_kernels.find(tmp_path) == {"pytorch-trace": [tmp_path / "trace_1.json"]}
    (tmp_path / "trace_1.json").unlink()
    assert load_kernels.find(tmp_path) == {"pytorch-trace": [tmp_path / "eager_trace_1.json"]}


@pytest.mark.parametrize(
    "name",
    [
        "results.csv_kernel_trace.csv",
        "results_kernel_trace.csv",
        "gpu01/results.csv_kernel_stats.csv",
    ],
)
def test_the_name_given_to_rocprofv3_finds_its_file(tmp_path, name):
    path = put(tmp_path / name, STATS if "stats" in name else TRACE)
    put(tmp_path / "results.csv_agent_info.csv", "Node_Id\n1\n")
    found = load_kernels.load(tmp_path / "results.csv")
    assert (
        found.path == path and "there is no" in found.notes[0] and "results.csv" in found.notes[0]
    )
