"""Files of nsys, written by the documented tables: the same calls and causes as those of a trace of
torch.profiler, and one line for what holds no kernels.
"""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from tests import nsys_files, small_traces
from tests.conftest import ROOT
from tests.nsys_files import ACTIVITY, MARK, PROCESS, Export
from tracepage.causes import waits
from tracepage.causes.host_time import copy_cause
from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.readers.source import Source
from tracepage.views import run_page

import pytest

TRACES = ROOT / "results/h200/traces"
SAME = ["name", "category", "duration_ns", "span", "phase", "step", "launch_delay_ns"]
OTHER = PROCESS + 1
HEADER = "Start (us),Duration (us),CorrId,GrdX,SrcMemKd,DstMemKd,Device,Strm,Name"
GPU_TRACE = f"""
NOTICE: Existing SQLite export found: timeline.sqlite

Processing [timeline.sqlite] with [cuda_gpu_trace.py]...
{HEADER}
5.5,2,3,,Pageable,Device,H100 (0),7,[CUDA memcpy Host-to-Device]
8,0.5,4,,Device,,H100 (0),7,[CUDA memset]
9,1.5,5,16,,,H100 (1),7,"axpy<int, 2>(float*)"

Processing [timeline.sqlite] with [cuda_api_sum.py]...
Time (%),Total Time (ns),Num Calls,Avg (ns),Name
100.0,900,3,300,cudaLaunchKernel
"""
KERNEL_SUM = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),StdDev (ns),Name
75.0,900,3,300.0,290.0,1.5,"axpy<int, 2>(float*)"
25.0,300,1,300.0,300.0,0.0,gemm
"""


def loaded(export: Export, path: Path) -> Source:
    return load_kernels.load(export.write(path / "timeline.sqlite"))


def both(events: list[dict], path: Path) -> tuple[Source, Source]:
    """A trace, and what nsys would have written of the same program."""
    (path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return load_kernels.load(path / "trace.json"), loaded(nsys_files.of_trace(events), path)


def recorded(name: str) -> list[dict]:
    return json.loads(gzip.decompress((TRACES / name).read_bytes()))["traceEvents"]


def test_the_calls_are_those_of_a_trace_of_torch(tmp_path):
    trace, export = both(small_traces.gpu_trace()["traceEvents"], tmp_path)
    assert (export.kind, export.steps, export.notes) == ("nsys", trace.steps, trace.notes)
    assert export.table[SAME].equals(trace.table[SAME])
    assert export.trace.operators.input_shapes.equals(trace.trace.operators.input_shapes)


@pytest.mark.parametrize("name", ["v1_small.json.gz", "v2_compile_small.json.gz"])
def test_a_step_has_the_causes_of_its_trace(name, tmp_path):
    trace, export = both(recorded(name), tmp_path)
    assert len(export.table) == len(trace.table)
    assert export.table.duration_ns.sum() == pytest.approx(trace.table.duration_ns.sum())
    theirs = waits.attribute(trace)
    causes = waits.attribute(export)
    assert causes.verdict["cause"] == theirs.verdict["cause"]
    assert causes.step_ms == pytest.approx(theirs.step_ms, rel=1e-3)
    parts = {(part["cause"], part["kind"]): part["ms"] for part in causes.parts}
    for part in theirs.parts:
        ms = parts.get((part["cause"], part["kind"]), 0)
        assert ms == pytest.approx(part["ms"], abs=0.01 * theirs.step_ms)


def test_ranges_alone_tell_the_spans_and_the_verdict_of_a_trace(tmp_path):
    """Our scripts mark their spans and steps, and nothing marks their operators."""
    events = recorded("v1_small.json.gz")
    trace = load_kernels.load(TRACES / "v1_small.json.gz")
    export = loaded(nsys_files.of_trace(events, operators=False), tmp_path)
    assert len(export.table) == len(trace.table)
    forward = trace.table.phase.isin(["forward", "optimizer"]) & (trace.table.span != "residual")
    for column in ("span", "phase"):
        assert list(export.table[column][forward]) == list(trace.table[column][forward])
    backward = export.table.phase == "backward"
    assert set(export.table.span[backward]) == {"backward"}
    assert backward.sum() == (trace.table.phase == "backward").sum()
    verdict = waits.attribute(export).verdict
    assert verdict["cause"] == waits.attribute(trace).verdict["cause"]


def test_the_deepest_range_of_the_launching_thread_is_the_span(tmp_path):
    export = Export()
    export.range("epoch", 0, 90_000)
    export.range("attention", 10_000, 40_000)
    export.range("my block", 12_000, 20_000)
    export.range("my head", 50_000, 60_000)
    export.range("other thread", 0, 90_000, thread=2)
    export.add("NVTX_EVENTS", 55_000, None, MARK, "a mark", None, PROCESS << 24 | 1)
    export.launched("in ours", 15_000, 16_000, 1, 13_000)
    export.launched("in theirs", 57_000, 58_000, 2, 55_000)
    export.launched("outer", 80_000, 81_000, 3, 79_000)
    export.launched("of the other", 82_000, 83_000, 4, 51_000, thread=2)
    export.launched("outside", 96_000, 97_000, 5, 95_000)
    source = loaded(export, tmp_path)
    spans = dict(zip(source.table.name, source.table.span, strict=True))
    assert spans == {
        "in ours": "attention",
        "in theirs": "my head",
        "outer": "epoch",
        "of the other": "other thread",
        "outside": "other",
    }
    assert source.notes == (), "a mark has no end, and needs none"
    page = run_page.make_page([source]).markdown()
    assert "| attention | 1 |" in page and "deepest NVTX range" in page


def test_a_thread_without_ranges_is_in_those_of_its_process(tmp_path):
    """The autograd engine launches from such a thread, in any process."""
    export = Export()
    export.range("backward", 10_000, 50_000)
    export.range("loader", 0, 90_000, process=OTHER)
    export.launched("of the backward pass", 20_000, 21_000, 1, 15_000, thread=9)
    export.launched("later", 70_000, 71_000, 2, 60_000, thread=9)
    export.range("ncclAllReduce", 30_000, 32_000, thread=9)
    export.launched("ncclDevKernel_AllReduce", 40_000, 41_000, 3, 31_000, thread=9)
    table = loaded(export, tmp_path).table
    assert list(table.span) == ["backward", "backward", "other"]
    assert table.phase[0] == "backward"


@pytest.mark.parametrize(
    "kind, cause",
    [(1, "copy_to_device"), (2, "copy_to_host"), (8, ""), (11, "copy_to_device")]
    + [(12, "copy_to_host"), (13, "")],
)
def test_copies_have_their_bytes_and_their_direction_in_unified_memory_too(kind, cause, tmp_path):
    export = Export()
    export.add(f"{ACTIVITY}MEMCPY", 5_000, 6_000, 0, 7, 2, PROCESS << 24, 16, kind, 0, 2)
    [copy] = loaded(export, tmp_path).table.itertuples()
    assert copy_cause(copy.name) == cause and copy.bytes == 16


def test_a_kernel_has_the_blocks_of_its_whole_grid(tmp_path):
    export = Export()
    name = export.text("gemm")
    place = (5_000, 6_000, 0, 7, 2, PROCESS << 24)
    export.add(f"{ACTIVITY}KERNEL", *place, name, name, 4, 2, 3)
    assert list(loaded(export, tmp_path).table.blocks) == [24]


def test_numbered_ranges_of_one_process_mark_the_steps(tmp_path):
    export = Export()
    for process in (PROCESS, OTHER):
        for number in range(2):
            begin = 100_000 * number
            export.range(f"iteration{number}", begin, begin + 90_000, process=process)
            times = (begin + 20_000, begin + 30_000, number, begin + 10_000)
            export.launched("gemm", *times, process=process, device=process - PROCESS)
    export.launched("after", 300_000, 310_000, 7, 290_000)
    source = loaded(export, tmp_path)
    assert source.steps == 2 and list(source.table.step) == [0, 0, 1, 1]
    assert any("1 kernel of 10 us" in note for note in source.notes)


def test_each_process_counts_its_launches_and_gpus_by_itself(tmp_path):
    export = Export()
    export.launched("first", 20_000, 30_000, 5, 1_000)
    export.launched("second", 20_000, 40_000, 5, 8_000, process=OTHER)
    apart = loaded(export, tmp_path)
    assert list(apart.table.launch_delay_ns) == [12_000, 19_000]
    assert apart.trace.gpus == 2 and any("2 GPUs" in note for note in apart.notes)

    export.add("TARGET_INFO_GPU", 3, "NVIDIA H100", 132, 80 << 30)
    for pid in (7, 8):
        export.add("TARGET_INFO_CUDA_DEVICE", 3, 0, pid)
    (tmp_path / "timeline.sqlite").unlink()
    shared = loaded(export, tmp_path)
    assert shared.trace.gpus == 1 and shared.device == "NVIDIA H100"
    assert shared.trace.devices[0]["multiprocessors"] == 132
    assert shared.table.stream.nunique() == 2, "stream 7 of each process is its own"


def test_kernels_of_a_graph_belong_to_its_launch(tmp_path):
    export = Export()
    export.call("cudaGraphLaunch_v10000", 1_000, 2_000, 4)
    export.kernel("node", 5_000, 6_000, 4)
    export.kernel("node", 6_000, 8_000, 4)
    trace = loaded(export, tmp_path).trace
    assert list(trace.kernels.graph) == [0, 0] and set(trace.kernels.phase) == {"other"}


def test_a_whole_graph_is_one_launch_with_a_note(tmp_path):
    export = Export()
    export.call("cudaGraphLaunch_v10000", 1_000, 2_000, 4)
    export.add(f"{ACTIVITY}GRAPH_TRACE", 5_000, 9_000, 0, 7, 4, PROCESS << 24, 109)
    export.add(f"{ACTIVITY}GRAPH_TRACE", 0, 0, 0, 7, 5, PROCESS << 24, 109)
    source = loaded(export, tmp_path)
    assert list(source.table.name) == ["CUDA graph 109"]
    assert list(source.table.launch_delay_ns) == [4_000]
    assert any("--cuda-graph-trace=node" in note for note in source.notes)
    assert any("1 row without a possible time" in note for note in source.notes)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        ("cudaStreamSynchronize_v3020", "synchronization"),
        ("cudaMalloc_v3020", "allocation"),
        ("cuModuleLoadDataEx", "compilation"),
    ],
)
def test_a_call_of_the_runtime_tells_why_the_gpu_waits(call, cause, tmp_path):
    export = Export()
    export.launched("first", 5_000, 1_000_000, 1, 1_000)
    export.call(call, 900_000, 3_000_000, 2)
    export.launched("second", 3_010_000, 3_100_000, 3, 3_005_000)
    verdict = waits.attribute(loaded(export, tmp_path)).verdict
    assert verdict["cause"] == cause and verdict["ms"] == pytest.approx(2, rel=0.1)


def test_a_call_of_the_operating_system_tells_where_the_host_is(tmp_path):
    export = Export()
    export.launched("first", 5_000, 10_000, 1, 1_000)
    export.call("cudaStreamSynchronize_v3020", 12_000, 400_000, 2)
    thread = PROCESS << 24 | 1
    export.add("OSRT_API", 20_000, 390_000, thread, export.text("ioctl"))
    export.add("OSRT_API", 500_000, 2_900_000, thread, export.text("pread64"))
    export.add("OSRT_API", 0, 3_000_000, PROCESS << 24 | 5, export.text("poll"))
    export.launched("second", 3_010_000, 3_100_000, 3, 3_005_000)
    source = loaded(export, tmp_path)
    verdict = waits.attribute(source).verdict
    assert verdict["cause"] == "host" and "pread64 (operating system)" in verdict["sentence"]
    names = [frame.name for frame in source.trace.frames]
    assert names == ["pread64 (operating system)"], "a call of the runtime says what is inside it"


def test_a_copy_has_the_name_that_torch_gives_it(tmp_path):
    export = Export()
    export.kernel("gemm", 1_000, 2_000, 1)
    place = (0, 7, 2, PROCESS << 24)
    export.add(f"{ACTIVITY}MEMCPY", 3_000, 4_000, *place, 16, 1, 1, 2)
    export.add(f"{ACTIVITY}MEMSET", 5_000, 6_000, *place, 16, 2)
    names = list(loaded(export, tmp_path).table.name)
    assert names == ["gemm", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]


def test_a_database_of_another_release_may_lack_columns(tmp_path, monkeypatch):
    columns = "start, end, deviceId, correlationId, demangledName"
    monkeypatch.setitem(nsys_files.COLUMNS, f"{ACTIVITY}KERNEL", columns)
    export = Export()
    export.call("cudaLaunchKernel_v7000", 1_000, 2_000, 6)
    export.add(f"{ACTIVITY}KERNEL", 5_000, 9_000, 0, 6, export.text("gemm"))
    assert list(loaded(export, tmp_path).table.launch_delay_ns) == [4_000]


def without_cuda() -> Export:
    export = Export()
    export.range("epoch", 0, 9_000)
    export.add("META_DATA_CAPTURE", "CAPTURE_EVENT_TYPE", "NvtxEvents")
    return export


def never_began() -> Export:
    export = Export()
    export.add("META_DATA_CAPTURE", "CAPTURE_EVENT_TYPE", "Cuda")
    export.add("DIAGNOSTIC_EVENT", 1, "CUDA injection initialized successfully.")
    export.add("DIAGNOSTIC_EVENT", 2, "No CUDA events collected.")
    return export


def only_calls() -> Export:
    export = Export()
    export.call("cudaGetDeviceCount_v3020", 0, 9, 1)
    return export


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (without_cuda, "did not trace CUDA, so profile with --trace=cuda,nvtx"),
        (never_began, "--capture-range.* must begin. nsys warned: No CUDA events collected"),
        (only_calls, "1 call of the runtime: none of them launched anything"),
        (Export, "nothing ran on one while nsys recorded"),
    ],
)
def test_an_export_without_kernels_says_why(export, message, tmp_path):
    with pytest.raises(UsageError, match=message) as error:
        loaded(export(), tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_export_is_refused_in_one_line(tmp_path):
    export = Export()
    for number in range(400):
        export.launched("gemm", 10 * number, 10 * number + 5, number, 10 * number)
    export.add(f"{ACTIVITY}KERNEL", 5, 9, 0, 7, 6, PROCESS << 24, 5, 5, 1, 1, 1)
    path = export.write(tmp_path / "timeline.sqlite")
    with pytest.raises(UsageError, match="StringIds has no text 5"):
        load_kernels.load(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE StringIds")
    with pytest.raises(UsageError, match="no such table: StringIds"):
        load_kernels.load(path)
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(path.read_bytes()[:-8_000])
    with pytest.raises(UsageError, match=f"{cut} .*is damaged"):
        load_kernels.load(cut)


def test_a_folder_of_nsys_gives_its_database(tmp_path):
    (tmp_path / "timeline.nsys-rep").write_bytes(b"\x07\x00")
    with pytest.raises(UsageError, match="nsys export --type sqlite .*timeline.nsys-rep` writes"):
        load_kernels.load(tmp_path)
    export = Export()
    export.launched("gemm", 5_000, 9_000, 1, 1_000)
    path = export.write(tmp_path / "timeline.sqlite")
    (tmp_path / "sum.csv").write_text(KERNEL_SUM)
    source = load_kernels.load(tmp_path)
    assert source.path == path and "1 of nsys-kernel-sum" in source.notes[0]


def test_a_table_of_launches_is_read_in_its_unit(tmp_path):
    (tmp_path / "out.csv").write_text(GPU_TRACE)
    source = load_kernels.load(tmp_path / "out.csv")
    assert source.kind == "nsys-gpu-trace" and any("2 GPUs" in note for note in source.notes)
    assert list(source.table.start_ns) == [0, 2_500, 3_500]
    assert list(source.table.duration_ns) == [2_000, 500, 1_500]
    assert list(source.table.category) == ["memcpy", "memset", "kernel"]
    assert source.table.name[0] == "Memcpy HtoD (Pageable -> Device)"


def test_a_table_of_sums_is_read(tmp_path):
    (tmp_path / "out.csv").write_text(KERNEL_SUM)
    source = load_kernels.load(tmp_path / "out.csv")
    assert source.kind == "nsys-kernel-sum"
    assert list(source.table.calls) == [3, 1] and list(source.table.duration_ns) == [900, 300]
    page = run_page.make_page([source]).markdown()
    assert "axpy" in page


def test_a_cut_off_table_is_refused(tmp_path):
    (tmp_path / "out.csv").write_text(KERNEL_SUM[:-12])
    with pytest.raises(UsageError, match="cut off or damaged: row 3 has"):
        load_kernels.load(tmp_path / "out.csv")
