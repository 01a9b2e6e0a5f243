"""Kernels from every profiler: one table whatever the file, figures that follow from it, and one line for what it is not."""

import csv
import gzip
import json
import os
import sqlite3

from common.analysis.formulas import flops, operators
from common.analysis.profiles import chrome_trace, kernel_names, kernel_table, load_kernels, pytorch, rocm
from common.analysis.profiles.kernel_names import kind
from common.analysis.reports import launches
from common.errors import UsageError
from tests.conftest import ROOT
from tests.small_traces import BATCH, CONFIG, LENGTH, STEPS, event, gpu_trace, record_cpu_trace, write_profile

import pytest

SCRIPT = ROOT / "version2_pytorch_fused" / "analyze_kernel_launches.py"
FIXTURES = ROOT / "tests" / "fixtures" / "kernels"
SAMPLES = ROOT.parent / "shared" / "samples" / "rocprof"
needs_samples = pytest.mark.skipif(not SAMPLES.exists(), reason="needs samples that are not part of the repository")

SCALE, COPY = "void scale<float>(float*, float, int)", "__amd_rocclr_copyBuffer"
LAUNCHES = [(SCALE, 0, 4000), (COPY, 3000, 13000), (SCALE, 20001, 1000)]  # of the three kernel traces: name, start, duration
CLOCK = 1_900_000_000_000_000_007  # their first start: beyond what a double resolves to a nanosecond
TRACES = ("old_kernel_trace.csv", "new_kernel_trace.csv", "rocpd_kernel_trace.csv")
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)"
STATS_HEADER = '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\n'
STATS = STATS_HEADER + f'"{SCALE}",2,5000,2500.0,27.78,1000,4000,2121.3\n"{COPY}",1,13000,13000.0,72.22,13000,13000,0.0\n'


def write_database(path, rows=LAUNCHES, view=True):
    """A database with the part of rocpd's schema that kernels come from: tables with a uuid in their name, views without."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE rocpd_kernel_dispatch_0000aaaa (kernel_id, start INTEGER, [end] INTEGER)")
        database.execute("CREATE TABLE rocpd_info_kernel_symbol_0000aaaa (id, display_name TEXT)")
        names = list(dict.fromkeys(name for name, _, _ in rows))
        database.executemany("INSERT INTO rocpd_info_kernel_symbol_0000aaaa VALUES (?, ?)", enumerate(names))
        rows = [(names.index(name), CLOCK + start, CLOCK + start + duration) for name, start, duration in rows]
        database.executemany("INSERT INTO rocpd_kernel_dispatch_0000aaaa VALUES (?, ?, ?)", rows)
        if view:
            database.execute(
                "CREATE VIEW kernels AS SELECT S.display_name AS name, K.start, K.[end], (K.[end] - K.start) AS duration "
                "FROM rocpd_kernel_dispatch_0000aaaa K JOIN rocpd_info_kernel_symbol_0000aaaa S ON S.id = K.kernel_id"
            )
    database.close()
    return path


def write_gpu_trace(path, launch="cudaLaunchKernel"):
    path.write_text(json.dumps(gpu_trace(launch)))
    return path


def launch_rows(found):
    return list(found.table[["name", "start_ns", "duration_ns"]].itertuples(index=False, name=None))


@pytest.fixture(scope="module")
def cpu_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    record_cpu_trace(path)
    return path


# --------------------------------------------------------------------------------------------------------- each source


@pytest.mark.parametrize("name", TRACES)
def test_kernel_traces_of_any_release_give_the_same_launches(name):
    found = load_kernels.load(FIXTURES / name)
    assert (found.source, launch_rows(found)) == ("rocprofv3-kernel-trace", LAUNCHES)
    assert list(found.table.category) == ["kernel", "memcpy", "kernel"] and set(found.table.calls) == {1}
    assert list(found.table.columns) == list(kernel_table.COLUMNS) and found.counters.shape == (3, 0)


def test_the_name_of_a_file_does_not_decide(tmp_path):
    (tmp_path / "hip_api_stats.json").write_bytes((FIXTURES / "new_kernel_trace.csv").read_bytes())
    assert launch_rows(load_kernels.load(tmp_path / "hip_api_stats.json")) == LAUNCHES
    (tmp_path / "kernel_trace.csv").write_text(STATS)
    assert load_kernels.load(tmp_path / "kernel_trace.csv").source == "rocprofv3-kernel-stats"


def test_statistics_have_sums_and_extremes_but_no_starts(tmp_path):
    (tmp_path / "out_kernel_stats.csv").write_text(STATS)
    found = load_kernels.load(tmp_path / "out_kernel_stats.csv")
    assert found.table.start_ns.isna().all() and launches.gaps(found) is None
    assert launches.summary(found) == [
        (COPY, "memcpy", 1, 13000, 13000, 13000, 13000, 13000 / 18000),
        (SCALE, "kernel", 2, 5000, 2500, 1000, 4000, 5000 / 18000),
    ]


def test_a_database_of_rocpd_is_read_and_not_written_to(tmp_path):
    path = write_database(tmp_path / "a b?#_results.db")
    path.chmod(0o444)
    before = path.read_bytes()
    found = load_kernels.load(path)
    assert (found.source, launch_rows(found)) == ("rocpd", LAUNCHES)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_pmc_perf_has_a_row_per_dispatch_and_its_counters():
    found = load_kernels.load(FIXTURES / "pmc_perf.csv")
    assert found.source == "rocprof-compute"
    assert list(found.table.duration_ns) == [4000, 13000] and list(found.table.start_ns) == [0, 45000]
    assert found.counters.to_dict("list") == {"SQ_WAVES": [16, 16], "TCC_HIT[0]": [3, 4], "TCC_HIT_sum": [96, 128]}
    assert launches.gaps(found) is None, "each kernel ran alone for its counters"


def test_both_pages_of_ncu_give_the_same_launches():
    details, raw = load_kernels.load(FIXTURES / "ncu_details.csv"), load_kernels.load(FIXTURES / "ncu_raw.csv")
    for found in (details, raw):
        assert found.source == "ncu" and list(found.table.name) == [FILL, "gemm_kernel", "gemm_kernel"]
        assert list(found.table.duration_ns) == pytest.approx([2240, 1_500_000, 1_234_560])
        assert found.table.start_ns.isna().all() and launches.gaps(found) is None


def test_counters_of_ncu_are_in_base_units():
    details, raw = (load_kernels.load(FIXTURES / f"ncu_{page}.csv").counters for page in ("details", "raw"))
    assert list(raw) == ["dram__bytes.sum", "gpu__time_duration.sum", "launch__registers_per_thread", "lts__t_sectors.sum"]
    assert list(raw["dram__bytes.sum"][:2]) == pytest.approx([2.1e6, 1.0245e9]) and raw["dram__bytes.sum"].isna()[2]
    assert list(raw["lts__t_sectors.sum"]) == [65536, 8192, 8192]
    first = details.loc[0].dropna().to_dict()
    assert first == pytest.approx({
        "DRAM Frequency (hz)": 2.61e9, "Duration (ns)": 2240, "Memory Throughput (%)": 41.5,
        "Memory Throughput (byte/s)": 936.2e9,
    })  # fmt: skip
    assert details["Elapsed Cycles (cycle)"][1] == 1_234_567


@pytest.mark.parametrize("launch", ["cudaLaunchKernel", "hipLaunchKernel"])
def test_a_trace_gives_the_kernels_of_its_steps(tmp_path, launch):
    found = load_kernels.load(write_gpu_trace(tmp_path / "trace.json", launch))
    assert (found.source, found.steps) == ("pytorch-trace", 2)
    assert launch_rows(found)[:4] == [
        ("gemm", 0, 30e3),
        ("add", 30e3, 5e3),
        ("gemm", 40e3, 30e3),
        ("Memset (Device)", 65e3, 10e3),
    ]
    assert list(found.table.category) == ["kernel", "kernel", "kernel", "memset", "kernel", "kernel"]


def test_a_trace_that_marks_no_steps_gives_all_its_kernels(tmp_path):
    content = gpu_trace()
    content["traceEvents"] = [each for each in content["traceEvents"] if not each["name"].startswith("ProfilerStep")]
    content["traceEvents"].append(event("gpu_memcpy", "CopyHostToDevice", 300, 310, 0, stream=7, correlation=98))
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    found = load_kernels.load(tmp_path / "trace.json.gz")
    assert found.steps is None and list(found.table.name)[0] == "before" and len(found.table) == 8
    assert found.table.iloc[-1][["name", "category"]].to_list() == ["CopyHostToDevice", "memcpy"]


def test_trace_and_profile_of_one_run_agree(tmp_path, cpu_path):
    for trace in (write_gpu_trace(tmp_path / "trace.json"), cpu_path):
        write_profile(tmp_path / "profile_1.json", trace)
        sums = [
            {row.name: (row.category, row.calls, pytest.approx(row.total_ns, rel=1e-3, abs=20 * row.calls)) for row in rows}
            for rows in (launches.summary(load_kernels.load(path)) for path in (trace, tmp_path / "profile_1.json"))
        ]
        assert sums[0] == sums[1]


def test_operators_of_a_cpu_are_those_that_work(cpu_path):
    found, trace = load_kernels.load(cpu_path), chrome_trace.load(cpu_path)
    assert found.are_operators and found.notes == (pytorch.OPERATORS,) and found.steps == STEPS
    names = set(found.table.name)
    assert {"aten::mm", "aten::bmm", "aten::silu", "aten::add", "aten::embedding_dense_backward"} <= names
    assert not names & {"aten::view", "aten::empty", "aten::linear", "aten::matmul", "aten::t", "MmBackward0", "autograd engine"}
    products = trace.operators[trace.operators.name.isin(["aten::mm", "aten::bmm"]) & (trace.operators.step >= 0)]
    assert found.table.name.isin(["aten::mm", "aten::bmm"]).sum() == len(products)
    counted = sum(
        operators.cost(name, json.loads(shapes), json.loads(types))[0]
        for name, shapes, types in zip(products.name, products.input_shapes, products.input_types, strict=True)
    )
    assert counted == STEPS * flops.training_step(CONFIG, BATCH, LENGTH, causal=False)["total"], "no product is left out"
    busy = launches.gaps(found)
    assert busy.busy_ns + busy.idle_ns.sum() == pytest.approx(busy.window_ns) and 0 < busy.busy_ns < busy.window_ns


def test_frames_of_torch_compile_are_no_operators(tmp_path):
    names = ["TorchDynamo Cache Lookup", "Torch-Compiled Region: 0/0", "Pregraph bytecode", "CompiledFunction", "aten::mm"]
    events = [event("cpu_op", name, 10 * i, 10 * i + 5) for i, name in enumerate(names)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = load_kernels.load(tmp_path / "trace.json")
    assert list(found.table.name) == ["CompiledFunction", "aten::mm"]
    assert found.notes == (pytorch.OPERATORS, pytorch.COMPILED)


@pytest.mark.parametrize("preset", ["tiny", "small", "medium"])
def test_measured_profiles_keep_every_launch(preset):
    path = ROOT / "results" / "h100" / f"v1_{preset}_profile.json"
    profile = json.loads(path.read_text())
    rows = launches.summary(load_kernels.load(path))
    assert sum(row.calls for row in rows) == profile["launch"]["count"]
    assert sum(row.total_ns for row in rows) == pytest.approx(1e3 * sum(row["device_us"] for row in profile["kernels"]))
    assert {row.category for row in rows} == {"kernel", "memcpy", "memset"} and sum(row.share for row in rows) == pytest.approx(1)


def test_a_profile_of_attention_says_so(tmp_path):
    write_profile(tmp_path / "profile_1.json", write_gpu_trace(tmp_path / "trace.json"), attention_only=True)
    found = load_kernels.load(tmp_path / "profile_1.json")
    assert set(found.table.name) == {"gemm", "Memset (Device)"} and any("attention" in note for note in found.notes)


# -------------------------------------------------------------------------------------------------------- real samples


def column(path, *names):
    with path.open(newline="") as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


@needs_samples
@pytest.mark.parametrize("name", ["kernel_trace", "kernel_trace_truncated"])
def test_samples_of_kernel_traces(name):
    path = SAMPLES / "rocprofv3-docs" / f"{name}.csv"
    rows = column(path, "Kernel_Name", "Start_Timestamp", "End_Timestamp")
    first = min(int(start) for _, start, _ in rows)
    assert launch_rows(load_kernels.load(path)) == [
        (name, int(start) - first, int(end) - int(start)) for name, start, end in rows
    ]


@needs_samples
@pytest.mark.parametrize("path", sorted(SAMPLES.glob("rocprofv3-stats-excerpts/*kernel_stats*")), ids=lambda path: path.stem)
def test_samples_of_statistics(path):
    rows = {row.name: row for row in launches.summary(load_kernels.load(path))}
    for name, calls, total, mean, low, high in column(path, "Name", "Calls", "TotalDurationNs", "AverageNs", "MinNs", "MaxNs"):
        assert rows[name][2:4] + rows[name][5:7] == (int(calls), int(total), int(low), int(high))
        assert rows[name].mean_ns == pytest.approx(float(mean))
    assert rows[COPY].category == "memcpy"


@needs_samples
@pytest.mark.parametrize("workload", ["no_roof/MI300A_A1", "kernel_names/MI200"])
def test_samples_of_rocprof_compute(workload):
    folder = SAMPLES / "rocprof-compute" / workload
    found = load_kernels.load(folder)
    assert (found.source, found.path) == ("rocprof-compute", folder / "pmc_perf.csv")
    times = column(folder / "timestamps.csv", "Start_Timestamp", "End_Timestamp")
    assert list(found.table.duration_ns) == [int(end) - int(start) for start, end in times]
    assert found.counters.notna().any().all() and all(
        name[:2] in ("SQ", "SP", "CP", "TA", "TC", "TD", "GR") for name in found.counters
    )


@needs_samples
def test_sample_of_a_trace_of_an_mi250():
    found = load_kernels.load(SAMPLES / "torch-profiler-rocm" / "mi250_minitoy_train_ROCm6_2_kineto.json.gz")
    assert found.table.category.value_counts().to_dict() == {"kernel": 14, "memcpy": 2} and found.steps == 1
    assert 0 < launches.gaps(found).busy_ns <= found.table.duration_ns.sum()


@needs_samples
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rocprofv3-docs/hip_api_stats.csv", r"API calls.*give the \*_kernel_stats.csv"),
        ("rocprofv3-docs/hip_domain_stats.csv", r"give the \*_kernel_stats.csv"),
        ("rocprofv3-stats-excerpts/jacobi_hip_api_stats.csv", r"give the \*_kernel_stats.csv"),
        ("rocprofv3-stats-excerpts/jacobi_hip_domain_stats.csv", r"give the \*_kernel_stats.csv"),
        *((f"rocprofv3-docs/{name}.csv", r"not kernels: give the \*_kernel_trace.csv") for name in (
            "hip_trace", "hip_runtime_trace", "hsa_api_trace", "marker_api_trace", "rccl_trace", "memory_copy_trace",
            "memory_allocation_trace", "scratch_memory_trace", "python_bindings", "rocpd-to-csv")),
        ("rocprofv3-docs/counter_collection.csv", r"row per counter.*give the \*_kernel_trace.csv"),
        ("rocprofv3-docs/kernel_names.csv", r"row per counter.*give the \*_kernel_trace.csv"),
        ("rocprofv3-docs/summary.txt", "none of the files that hold kernels"),
        ("rocprof-compute/kernel_names/MI200/roofline.csv", "ceilings, not kernels: give the pmc_perf.csv"),
        ("rocprof-compute/kernel_names/MI200/sysinfo.csv", "none of the files that hold kernels"),
        ("rocprof-compute/kernel_names/MI200/kernelName_legend.pdf", "is binary"),
        ("rocprof-compute/no_roof/MI300A_A1/pmc_dispatch_info.csv", "none of the files that hold kernels"),
    ],
)  # fmt: skip
def test_samples_without_kernels_are_refused(name, message):
    with pytest.raises(UsageError, match=message):
        load_kernels.load(SAMPLES / name)


@needs_samples
def test_sample_of_measured_ceilings():
    ceilings = rocm.read_rocprof_ceilings(SAMPLES / "rocprof-compute/kernel_names/MI200/roofline.csv")
    assert ceilings["bytes_per_second"] == pytest.approx(
        {"hbm": 1.3889e12, "l2": 5.0174e12, "l1": 9.2270e12, "lds": 17.716e12}, rel=1e-4
    )
    rates = ceilings["flops_per_second"]
    assert list(rates) == ["fp32", "fp64", "mfma_bf16", "mfma_fp16", "mfma_fp32", "mfma_fp64", "mfma_int8"]
    assert rates["fp32"] < 23.9e12 and 150e12 < rates["mfma_fp16"] < 191.5e12, "half the data sheet of an MI250X: one die"


# ------------------------------------------------------------------------------------------------------- what is refused

HEADER = (FIXTURES / "new_kernel_trace.csv").read_text().splitlines()[0] + "\n"
NEW = (FIXTURES / "new_kernel_trace.csv").read_text().rstrip()
DETAILS, RAW = ((FIXTURES / f"ncu_{page}.csv").read_text() for page in ("details", "raw"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (HEADER, "has no rows"),
        (STATS_HEADER, "has no rows"),
        (NEW[:-20], r"cut off or damaged: row 4 has \d+ fields, the header 22"),
        (NEW + '\n"KERNEL_DISPATCH","Agent', "cut off or damaged: row 5"),
        (NEW.replace("1900000000000004007", "19"), "row 2 ends before it starts"),
        (NEW.replace("1900000000000016007", ""), "End_Timestamp in row 3 is no number: ''"),
        (STATS.replace(",13000,13000.0", ",many,13000.0"), "TotalDurationNs in row 3 is no number: 'many'"),
        ("step,loss\n1,6.9\n", "none of the files that hold kernels"),
        ("loss 6.9 at step 1\n", "none of the files that hold kernels"),
        ("x" * 200_000 + "\n", "none of the files that hold kernels"),
        ('"unclosed,' + "x" * 200_000, "none of the files that hold kernels"),
        (STATS_HEADER + '"hipMemcpy",3,9,3.0,100.0,1,5,1.0\n"__hipPushCallConfiguration",1,1,1.0,0.0,1,1,0.0\n', "API calls"),
        (STATS_HEADER + '"MEMORY_COPY_HOST_TO_DEVICE",3,9,3.0,100.0,1,5,1.0\n', "or copies, not of kernels"),
        ('"Index","KernelName","gpu-id","BeginNs","EndNs"\n0,"k",1,2,3\n', "before rocprofv3"),
        ("device,HBMBw,L2Bw,FP32Flops\n0,1300,5000,20000\n", "ceilings, not kernels"),
        (b"SQLite format 3\0" + b"x" * 100, "is not a database of rocpd, or is damaged"),
        (b"NVR\0\x01\x02", "ncu --import"),
        (b"\x7fELF\0\0", "is binary"),
        (gzip.compress(STATS.encode(), mtime=0), "unpack it first"),
        (gzip.compress(json.dumps(gpu_trace()).encode(), mtime=0)[:-60], "damaged gzip"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 50, "damaged gzip"),
        ('{"rocprofiler-sdk-tool": []}', "--output-format csv"),
        ('{"schema": "tiny-llama-run/1"}', "neither a trace"),
        ('{"traceEvents": []}', "no PyTorch operators"),
        ('{"traceEvents": [{"ph"', "cut off"),
        (DETAILS.split('"ID"')[0], "without a table: profile with --csv"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "look for ==ERROR=="),
        (DETAILS.splitlines()[6] + "\n", "has no rows"),
        ("\n".join(RAW.splitlines()[2:4]) + "\n", "has no rows"),
        (DETAILS.replace('"Duration"', '"Elapsed"'), "without a duration"),
        (DETAILS.replace('"Duration","ms","1.50"', '"Duration","","n/a"'), "without a duration"),
        ("\n".join(line for line in RAW.splitlines() if not line.startswith('"",')), "no row of units"),
        (RAW[:-40], "cut off or damaged"),
        ('"Process ID","Kernel Name","Invocations","Metric Name","Metric Unit","Average"\n"1","k","3","Duration","us","2"\n',
         "leave --print-summary out"),
    ],
    ids=lambda value: "bytes" if isinstance(value, bytes) else None,
)  # fmt: skip
def test_what_holds_no_kernels_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "given.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message) as error:
        load_kernels.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_markers_are_known_by_their_file(tmp_path):
    (tmp_path / "1_marker_api_stats.csv").write_text(STATS_HEADER + '"attention",3,9,3.0,100.0,1,5,1.0\n')
    with pytest.raises(UsageError, match="not of kernels"):
        load_kernels.load(tmp_path / "1_marker_api_stats.csv")


def test_a_database_without_the_view_or_without_kernels_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not one of rocpd .no view `kernels`"):
        load_kernels.load(write_database(tmp_path / "nsys.db", view=False))
    with pytest.raises(UsageError, match="has no rows"):
        load_kernels.load(write_database(tmp_path / "cpu_results.db", launches=[]))
    whole = write_database(tmp_path / "results.db", LAUNCHES * 500).read_bytes()
    (tmp_path / "results.db").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is damaged"):
        load_kernels.load(tmp_path / "results.db")


# ------------------------------------------------------------------------------------------------------ folders and names


def put(path, content, age=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_a_folder_gives_the_newest_run_of_its_best_source(tmp_path):
    put(tmp_path / "workloads/v2/MI300A_A1/pmc_perf.csv", (FIXTURES / "pmc_perf.csv").read_bytes())
    put(tmp_path / "workloads/v2/MI300A_A1/SQ_LEVEL_WAVES.csv", (FIXTURES / "pmc_perf.csv").read_bytes())
    put(tmp_path / "workloads/v2/MI300A_A1/roofline.csv", "device,HBMBw\n0,1\n")
    put(tmp_path / "metrics_v2.json", '{"schema": "tiny-llama-run/1"}')
    put(tmp_path / "notes.txt", NEW)
    assert load_kernels.find(tmp_path) == {"rocprof-compute": [tmp_path / "workloads/v2/MI300A_A1/pmc_perf.csv"]}

    stats = put(tmp_path / "host/1_kernel_stats.csv", STATS)
    assert load_kernels.load(tmp_path).path == stats
    assert any("not read" in note and "1 of rocprof-compute" in note for note in load_kernels.load(tmp_path).notes)
    database = write_database(tmp_path / "host" / "7_results.db")
    assert load_kernels.load(tmp_path).path == database
    old = put(tmp_path / "host/9_kernel_trace.csv", NEW, age=60)
    new = put(tmp_path / "host/3_kernel_trace.csv", NEW)
    put(tmp_path / ".venv/lib/5_kernel_trace.csv", NEW, age=-60)
    found = load_kernels.load(tmp_path)
    assert found.path == new and any("1 other of rocprofv3-kernel-trace (each" in note for note in found.notes)
    assert any("own), 1 of rocpd" in note for note in found.notes)
    os.utime(old)
    assert load_kernels.load(tmp_path).path == old


def test_the_newest_profile_is_the_one_whose_name_sorts_last(tmp_path):
    trace = write_gpu_trace(tmp_path / "trace.json")
    for name in ("profile_20260102T000000_1.json", "profile_20260101T000000_9.json"):
        write_profile(tmp_path / name, trace)
    trace.unlink()
    assert load_kernels.load(tmp_path).path.name == "profile_20260102T000000_1.json"


def test_a_folder_without_kernels_says_what_it_looks_for(tmp_path):
    put(tmp_path / "sub/loss.csv", "step,loss\n1,6.9\n")
    with pytest.raises(UsageError, match=r"holds no kernels: looked in it and below for .*_kernel_trace.csv.*ncu --csv"):
        load_kernels.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "results.csv_kernel_trace.csv",
        "results.csv_kernel_stats.csv",
        "results.csv_results.db",
        "results_kernel_trace.csv",
        "gpu01/results.csv_kernel_trace.csv",
        "gpu01/results.csv_kernel_stats.csv",
    ],
)
def test_the_name_given_to_rocprofv3_finds_its_file(tmp_path, name):
    path = put(tmp_path / name, STATS if "stats" in name else NEW)
    if path.suffix == ".db":
        path.unlink()
        write_database(path)
    put(tmp_path / "results.csv_agent_info.csv", "Node_Id\n1\n")
    found = load_kernels.load(tmp_path / "results.csv")
    assert found.path == path and "there is no" in found.notes[0] and "results.csv" in found.notes[0]
    assert found.table.duration_ns.sum() == 18000


# ------------------------------------------------------------------------------------------------------------- figures


def test_gaps_are_where_no_kernel_runs():
    found = launches.gaps(load_kernels.load(FIXTURES / "new_kernel_trace.csv"))
    assert (found.window_ns, found.busy_ns, list(found.idle_ns)) == (21001, 17000, [4001]), "the first two overlap by 1000 ns"


def test_a_kernel_that_runs_beside_a_longer_one_ends_no_gap(tmp_path):
    rows = [("long", 0, 100), ("inside", 10, 20), ("inside", 50, 10), ("after", 150, 10)]
    found = launches.gaps(load_kernels.load(write_database(tmp_path / "results.db", rows)))
    assert (found.window_ns, found.busy_ns, list(found.idle_ns)) == (160, 110, [50])


def test_summary_adds_up_by_name():
    rows = launches.summary(load_kernels.load(FIXTURES / "new_kernel_trace.csv"))
    assert rows == [
        (COPY, "memcpy", 1, 13000, 13000, 13000, 13000, 13000 / 18000),
        (SCALE, "kernel", 2, 5000, 2500, 1000, 4000, 5000 / 18000),
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (SCALE, "scale<float>"),
        ("vecCopy(double*, double*, int) [clone .kd]", "vecCopy"),
        ("vecCopy(double*, double*, int) (.kd)", "vecCopy"),
        ("vecCopy.kd", "vecCopy"),
        ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("aten::mm", "aten::mm"),
        ("void (anonymous namespace)::softmax<float, float, 7, false>(float*, int)", "softmax<false>"),
        ("std::enable_if<!(false), void>::type internal::gemv<int, float, 32>(Params<float>)", "gemv<32>"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
         "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, at::native::AUnaryFunctor<float>)",
         "vectorized_elementwise_kernel<AUnaryFunctor<MulFunctor<float>>, arr..."),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}"
         "::operator()() const::{lambda(float)#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
         "vectorized_elementwise_kernel<silu_kernel(TensorIteratorBase&)::{la..."),
        ("Cijk_" + "x" * 100, "Cijk_" + "x" * 62 + "..."),
    ],
)  # fmt: skip
def test_short_names_keep_what_tells_kernels_apart(name, short):
    assert kernel_names.short_name(name) == short


def test_ceilings_of_other_releases(tmp_path):
    path = put(
        tmp_path / "roofline.csv",
        "device,HBMBw,HBMBwLow,hbmBwHigh,MALLBw,L2Bw,FP16Flops,BF16Flops,I8Ops,MFMAF4Flops,MFMAF6F4Flops,MFMABF16Flops,WMMAF16Flops\n"
        "2,4000.5,1,1,8000,0,30000,15000,60000,900000,800000,700000,0\n",
    )
    assert rocm.read_rocprof_ceilings(path) == {
        "device": 2,
        "bytes_per_second": {"hbm": 4000.5e9, "mall": 8000e9},
        "flops_per_second": {
            "fp16": 30e12, "bf16": 15e12, "int8": 60e12, "mfma_fp4": 900e12, "mfma_fp6f4": 800e12, "mfma_bf16": 700e12,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (STATS, "no roofline.csv"),
        ("device,HBMBw\n", "no device"),
        ("device,HBMBw\n0\n", "cut off"),
        ("device,HBMBw\n0,x\n", "no number"),
    ],
)
def test_what_are_no_ceilings_is_refused(tmp_path, content, message):
    with pytest.raises(UsageError, match=message):
        rocm.read_rocprof_ceilings(put(tmp_path / "roofline.csv", content))


# -------------------------------------------------------------------------------------------------------------- script


def facts(output):
    """The lines before the table, by their first words."""
    lines = output.split("\n\n")[0].splitlines()
    return {line[:15].strip(): line[15:].strip() for line in lines}


def test_a_row_has_mean_least_and_most_of_its_calls():
    found = load_kernels.load(FIXTURES / "new_kernel_trace.csv")
    lines = [line.split() for line in launches.text(found, launches.summary(found), 5).splitlines()]
    assert ["scale<float>", "2", "5", "2.5", "1", "4", "27.8"] in lines  # calls, us: total, mean, min, max; %


def test_of_an_even_number_of_gaps_the_median_lies_between(tmp_path):
    launches = [(SCALE, 0, 10_000), (SCALE, 11_000, 10_000), (SCALE, 24_000, 10_000)]  # gaps of 1 and 3 us
    write_database(tmp_path / "results.db", launches)
    found = load_kernels.load(tmp_path / "results.db")
    assert "gaps: 2, median 2.0 us, longest 3.0 us" in launches.text(found, launches.summary(found), 5)


def test_version_3s_kernels_have_their_kinds():
    names = ("_rope_forward", "_swiglu_backward", "_rms_norm_backward", "_flash_attention_forward")
    assert [kind(name) for name in names] == ["elementwise", "elementwise", "reductions", "attention"]
    assert kind("_linear_cross_entropy_loss_and_gradient") == "reductions"


def test_script_reports_a_kernel_trace(tmp_path, run_script):
    put(tmp_path / "results.csv_kernel_trace.csv", NEW)
    done = run_script(SCRIPT, "--trace-file", "results.csv", "--csv-out", "tables/launches.csv", "--top", 1)
    found = facts(done.stdout)
    assert found["source"] == "rocprofv3-kernel-trace, results.csv_kernel_trace.csv"
    assert found["note"] == (
        "there is no results.csv: took results.csv_kernel_trace.csv, since rocprofv3 adds to the name given with -o"
    )
    assert found["launches"] == "3; kernel 2, memcpy 1" and found["distinct"] == "2 kernels" and found["total time"] == "0.018 ms"
    assert found["busy"].startswith("80.9 % of 0.021 ms") and "gaps: 1, median 4.0 us, longest 4.0 us" in found["busy"]
    assert found["under 10 us"].startswith("2: 66.7 % of them, 27.8 % of the time")
    assert "longest 1 of 2" in done.stdout and COPY in done.stdout and "scale<float>" not in done.stdout
    rows = column(tmp_path / "tables/launches.csv", "name", "calls", "total_ns")
    assert rows == [(COPY, "1", "13000.0"), (SCALE, "2", "5000.0")], "all kernels, with their full names"
    assert not done.stderr


def test_script_calls_operators_by_their_name(run_script, cpu_path):
    done = run_script(SCRIPT, "--trace-file", cpu_path)
    found = facts(done.stdout)
    assert "operator calls" in found and "launches" not in found and found["note"] == pytorch.OPERATORS
    assert f"(steps: {STEPS})" in found["operator calls"] and "aten::mm" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--trace-file", "missing.csv"), "missing.csv does not exist: give "), (("--top", "0"), "not a positive whole number")],
)
def test_script_refuses_bad_input_in_one_line(refused, arguments, message):
    assert message in refused(SCRIPT, *arguments)


def test_the_busy_share_is_left_out_without_starts(tmp_path):
    put(tmp_path / "1_kernel_stats.csv", STATS.replace(",2,5000,", ",20,50000,"))
    found = facts(launches.analyze(tmp_path, 5, None))
    assert found["launches"] == "21; kernel 20, memcpy 1" and found["busy"].startswith("left out: this source has sums")
    assert found["under 10 us"].startswith("20: 95.2 % of them, 79.4 % of the time, by the mean of each kernel")


def test_gaps_of_a_counting_profiler_are_not_the_programs():
    found = facts(launches.analyze(FIXTURES / "pmc_perf.csv", 5, None))
    assert found["note"] == kernel_table.ONE_BY_ONE and found["busy"] == "left out: see the note"


def test_the_csv_file_must_be_one_that_can_be_written(tmp_path):
    with pytest.raises(UsageError, match="--csv-out: .* is a folder"):
        launches.analyze(FIXTURES / "pmc_perf.csv", 5, tmp_path)
    put(tmp_path / "file", "")
    with pytest.raises(UsageError, match="--csv-out: cannot write"):
        launches.analyze(FIXTURES / "pmc_perf.csv", 5, tmp_path / "file" / "launches.csv")
