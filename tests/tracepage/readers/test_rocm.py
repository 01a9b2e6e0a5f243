"""Files of rocprofv3, rocpd and rocprof-compute: the same kernels whatever the release, and
measured ceilings.
"""

import gzip

from tests.kernel_files import (
    COPY,
    FIXTURES,
    LAUNCHES,
    SCALE,
    STATS,
    launch_rows,
    put,
    write_database,
)
from tracepage.errors import UsageError
from tracepage.readers import kernel_names, load_kernels, source
from tracepage.views import launches

import pytest


@pytest.mark.parametrize(
    "name", ["old_kernel_trace.csv", "new_kernel_trace.csv", "rocpd_kernel_trace.csv"]
)
def test_kernel_traces_of_any_release_give_the_same_launches(name):
    found = load_kernels.load(FIXTURES / name)
    assert (found.kind, launch_rows(found)) == ("rocprofv3-kernel-trace", LAUNCHES)
    assert list(found.table.category) == ["kernel", "memcpy", "kernel"] and set(
        found.table.calls
    ) == {1}
    assert list(found.table.columns) == list(source.CALL_COLUMNS) and found.counters.shape == (
        3,
        0,
    )


def test_statistics_have_sums_and_extremes_but_no_starts(tmp_path):
    (tmp_path / "out_kernel_stats.csv").write_text(STATS)
    found = load_kernels.load(tmp_path / "out_kernel_stats.csv")
    assert found.table.start_ns.isna().all() and launches.gaps(found) is None
    assert list(launches.summary(found).itertuples(index=False, name=None)) == [
        (COPY, "memcpy", 1, 13000, 13000, 13000 / 18000),
        (SCALE, "kernel", 2, 5000, 2500, 5000 / 18000),
    ]


def test_a_database_of_rocpd_is_read_and_not_written_to(tmp_path):
    path = write_database(tmp_path / "a b?#_results.db")
    path.chmod(0o444)
    before = path.read_bytes()
    found = load_kernels.load(path)
    assert (found.kind, launch_rows(found)) == ("rocpd", LAUNCHES)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["pmc_perf.csv", "pmc_perf_long.csv"])
def test_pmc_perf_has_a_row_per_dispatch_and_its_counters(tmp_path, name):
    """Whether its counters are columns or rows, and whether it is compressed."""
    (tmp_path / "pmc_perf.csv.gz").write_bytes(gzip.compress((FIXTURES / name).read_bytes()))
    found, unpacked = load_kernels.load(tmp_path), load_kernels.load(FIXTURES / name)
    assert found.table.equals(unpacked.table) and found.counters.equals(unpacked.counters)
    assert found.kind == "rocprof-compute"
    assert list(found.table.duration_ns) == [4000, 13000] and list(found.table.start_ns) == [
        0,
        45000,
    ]
    assert found.counters.to_dict("list") == {
        "SQ_WAVES": [16, 16],
        "TCC_HIT[0]": [3, 4],
        "TCC_HIT_sum": [96, 128],
    }
    assert launches.gaps(found) is None, "each kernel ran alone for its counters"


ROCPROFV2 = (
    "Dispatch_ID,GPU_ID,Queue_ID,PID,TID,Grid_Size,Workgroup_Size,LDS_Per_Workgroup,"
    "Scratch_Per_Workitem,Arch_VGPR,Accum_VGPR,SGPR,Wave_Size,Kernel_Name,Start_Timestamp,"
    "End_Timestamp,Correlation_ID"
)


def rocprofv2(counter: str = "") -> str:
    """Ten kernels of 40 us, one every 100 us."""
    rows = [
        f'{i},{i % 2},1,500,500,64,64,0,0,8,0,16,64,"add(int) [clone .kd]",{start},{start + 40000},{i}'
        for i, start in enumerate(range(10**15, 10**15 + 1_000_000, 100_000))
    ]
    header = f"{ROCPROFV2},{counter}" if counter else ROCPROFV2
    return "\n".join([header, *(f"{row},7" if counter else row for row in rows)])


def test_a_table_of_rocprofv2_without_counters_has_times_of_launches(tmp_path):
    path = put(tmp_path / "results.csv", rocprofv2())
    found = load_kernels.load(path)
    gaps = launches.gaps(found)
    assert (len(found.table), gaps.busy_ns, gaps.window_ns) == (10, 400_000, 940_000)
    assert found.notes[0].startswith("it has launches of 2 GPUs")
    assert load_kernels.load(tmp_path).path == path
    for counter in ("SQ_WAVES", "FETCH_SIZE"):
        put(path, rocprofv2(counter))
        assert launches.gaps(load_kernels.load(path)) is None, "each kernel ran alone"


def test_the_pass_of_a_workload_without_counters_is_not_its_table(tmp_path):
    put(tmp_path / "timestamps.csv", rocprofv2())
    joined = put(tmp_path / "pmc_perf.csv", rocprofv2("SQ_WAVES"), age=60)
    assert load_kernels.load(tmp_path).path == joined


STATISTICS = '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n'
CALLS = {  # file: its names
    "results.copy_stats.csv": ("CopyDeviceToHost", "CopyHostToDevice"),
    "results.hip_stats.csv": ("hipMemcpy", "hipLaunchKernel"),
    "given.csv": ("CopyDeviceToDevice",),
    "1_rocdecode_api_stats.csv": ("rocDecCreateDecoder", "rocDecDecodeFrame"),
    "decoded.csv": ("rocDecCreateDecoder", "rocDecDecodeFrame"),
    "rocjpeg_api_stats.csv": ("rocJpegDecode",),
    "1_rocnext_api_stats.csv": ("next_open", "close"),
    "1_memory_copy_stats.csv": ("MEMORY_COPY_HOST_TO_DEVICE",),
    "1_marker_api_stats.csv": ("void scale<float>(float*)",),
}


@pytest.mark.parametrize("name", CALLS)
def test_statistics_of_calls_and_copies_are_no_kernels(name, tmp_path):
    rows = "".join(f'"{call}",3,9000,3000,50\n' for call in CALLS[name])
    path = put(tmp_path / name, STATISTICS + rows)
    with pytest.raises(UsageError, match="statistics of API calls or copies, not of kernels"):
        load_kernels.load(path)
    kernels = put(tmp_path / "results.stats.csv", f'{STATISTICS}"add(int)",300,9000,30,90\n', 60)
    assert load_kernels.load(tmp_path).path == kernels, "it is the older one"


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("any.csv", ("triton_poi_fused_add_0", "triton_red_fused_1")),
        ("any.csv", ("Cijk_Ailk", "vecAdd")),
        ("any.csv", ("vecAdd",)),
        ("1_kernel_stats.csv", ("vecAdd", "vecScale")),
    ],
)
def test_names_without_parameters_can_be_kernels(file, names, tmp_path):
    rows = "".join(f'"{name}",3,9000,3000,50\n' for name in names)
    assert len(load_kernels.load(put(tmp_path / file, STATISTICS + rows)).table) == len(names)


def test_launches_of_two_gpus_with_one_number_are_two(tmp_path):
    header, *rows = (FIXTURES / "pmc_perf_long.csv").read_text().splitlines()
    text = "\n".join([header, *(row.replace("4,", f"{gpu},", 1) for gpu in (0, 1) for row in rows)])
    (tmp_path / "pmc_perf.csv").write_text(text)
    found = load_kernels.load(tmp_path / "pmc_perf.csv")
    assert len(found.table) == len(found.counters) == 4 and list(found.counters["TCC_HIT_sum"]) == [
        96,
        128,
        96,
        128,
    ]


def test_a_trace_of_torch_profiler_on_an_mi300x():
    found = load_kernels.load(FIXTURES / "amd/bert_mi300x.json.gz")
    kinds = found.table.groupby([kernel_names.kind(name) for name in found.table.name]).calls.sum()
    assert (
        found.steps == 1
        and found.table.duration_ns.sum() == 390_748
        and kinds.to_dict()
        == {
            "matrix products": 26,
            "elementwise": 16,
            "reductions": 11,
            "attention": 4,
            "copies": 4,
        }
    )
