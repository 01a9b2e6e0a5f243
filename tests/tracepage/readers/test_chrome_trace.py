"""Attribution of a trace's events: every microsecond and every kernel has one operator, span, phase
and step.
"""

import gzip
import json

from tests import small_traces
from tests.small_traces import BATCH, CONFIG, LENGTH, STEPS, gpu_trace, rank_trace
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, load_kernels

import pytest
import torch


@pytest.fixture(scope="module")
def cpu(cpu_trace):
    return chrome_trace.load(cpu_trace)


@pytest.fixture(params=["cudaLaunchKernel", "hipLaunchKernel"])
def gpu(request, tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_trace(request.param)).encode()))
    return chrome_trace.load(path)


def covered(path):
    """Time in which each thread is in some operator, straight from the file: the union of the
    intervals.
    """
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    total, ends = 0.0, {}
    operations = [
        event for event in json.loads(text)["traceEvents"] if event.get("cat") == "cpu_op"
    ]
    for event in sorted(operations, key=lambda event: event["ts"]):
        end = ends.get(event["tid"], float("-inf"))
        total += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        ends[event["tid"]] = max(end, event["ts"] + event["dur"])
    return total


def test_self_times_add_up_to_the_time_covered_by_operators(cpu, cpu_trace):
    assert cpu.operators.self_cpu_ns.sum() == pytest.approx(1e3 * covered(cpu_trace), rel=1e-4)
    assert cpu.operators.self_cpu_ns.min() > -10
    assert set(cpu.operators.span) == {
        "embed",
        "norm",
        "attention",
        "mlp",
        "loss",
        "residual",
        "optimizer",
        "other",
    }
    assert set(cpu.operators.phase) == {"forward", "backward", "optimizer", "other"}


def test_the_backward_has_its_forward_span_but_for_first_and_summed_gradients(cpu):
    backward = cpu.operators[cpu.operators.phase == "backward"]
    first = {"aten::ones_like", "aten::empty_like", "aten::empty_strided", "aten::fill_"}
    accumulation = {"torch::autograd::AccumulateGrad", "autograd engine", "aten::detach", "detach"}
    other = backward[backward.span == "other"]
    assert set(other.name) <= first | accumulation
    # one a parameter
    assert (other.name == "torch::autograd::AccumulateGrad").sum() == STEPS * (
        2 + 9 * CONFIG.num_layers
    )
    assert set(backward.span) == {"embed", "norm", "attention", "mlp", "loss", "residual", "other"}


def test_the_span_of_a_backward_product_is_that_of_its_layer(cpu):
    """The vocabulary size occurs only in the head, F only in the feed-forward, K Dh and S only in
    attention.
    """
    products = cpu.operators[cpu.operators.name.isin(["aten::mm", "aten::bmm"])]
    for phase, times in (("forward", 1), ("backward", 2)):
        rows = products[products.phase == phase]
        sizes = [
            {side for shape in json.loads(shapes) for side in shape} for shapes in rows.input_shapes
        ]
        own = {CONFIG.vocab_size: "loss", CONFIG.intermediate_size: "mlp"}
        assert list(rows.span) == [
            next((own[side] for side in size if side in own), "attention") for size in sizes
        ]
        assert len(rows) == times * STEPS * (1 + 9 * CONFIG.num_layers)


def test_residual_additions_steps_and_memory_of_a_cpu(cpu):
    residual = cpu.operators[
        (cpu.operators.span == "residual") & (cpu.operators.phase == "forward")
    ]
    assert list(residual.name) == ["aten::add"] * 2 * CONFIG.num_layers * STEPS

    assert len(cpu.steps) == STEPS and list(cpu.operators.step.unique()) == list(range(STEPS))
    assert cpu.step_ns() == pytest.approx(list(cpu.steps.duration_ns), rel=1e-3)
    assert cpu.device_busy_ns() == 0 and cpu.kernels.empty

    # what an earlier profile saw may still be there
    assert (cpu.memory.total_bytes - cpu.memory.bytes.cumsum()).nunique() == 1
    assert set(cpu.memory.device) == {"cpu"}
    scores = BATCH * CONFIG.num_attention_heads * LENGTH * LENGTH * 4
    softmax = cpu.operators[cpu.operators.name == "aten::_softmax"]
    assert set(softmax.allocated_bytes) == {scores}


def test_kernels_get_operator_span_phase_and_step_from_their_launch(gpu):
    rows = list(gpu.kernels[["name", "span", "phase", "step"]].itertuples(index=False, name=None))
    assert rows == [
        ("before", "other", "other", -1),
        ("gemm", "attention", "forward", 0),
        ("add", "residual", "forward", 0),
        ("gemm", "attention", "backward", 0),
        ("Memset (Device)", "attention", "backward", 0),
        ("foreach", "optimizer", "optimizer", 0),
        ("gemm", "mlp", "forward", 1),
    ]
    assert list(gpu.kernels.launch_delay_ns.dropna() / 1e3) == [6, 17, 6, 27, 15, 19]
    assert list(gpu.kernels.stream) == [7, 7, 7, 7, 8, 7, 7]


def test_an_operator_has_its_time_and_that_below_and_the_engine_its_nodes_span(gpu):
    matmul, mm, *_ = gpu.operators.itertuples()
    assert (matmul.name, matmul.device_ns, matmul.self_device_ns) == ("aten::matmul", 30_000, 0)
    assert (mm.name, mm.device_ns, mm.self_device_ns) == ("aten::mm", 30_000, 30_000)
    assert matmul.self_cpu_ns == 2000 and mm.self_cpu_ns == 16_000, (
        "launching belongs to the operator that launches"
    )
    assert gpu.operators.self_device_ns.sum() == 164_000, "all but the kernel from before"

    engine = gpu.operators[gpu.operators.name == "autograd engine"]
    assert list(engine.span) == ["residual", "attention", "other"] and set(engine.phase) == {
        "backward"
    }
    assert list(engine.self_cpu_ns) == [4000, 3000, 4000] == list(engine.cpu_ns)
    last = gpu.operators[gpu.operators.name == "aten::copy_"].iloc[0]
    assert (last.span, last.phase, last.step) == ("other", "other", 0), (
        "after the backward nothing counts as forward"
    )


def test_a_kernel_without_a_launch_is_of_the_step_it_runs_in_or_the_one_before(
    tmp_path,
):
    """A graph's kernels can lack their correlation; one that has it was launched before the trace
    began.
    """
    events = [
        small_traces.event("user_annotation", "ProfilerStep#1", 0, 100),
        small_traces.event("cpu_op", "aten::mm", 1, 9),
        small_traces.event("cuda_runtime", "cudaLaunchKernel", 2, 3, correlation=7),
        small_traces.event("kernel", "warm-up", 5, 9, correlation=98),
        small_traces.event("kernel", "graph", 10, 20),
        small_traces.event("kernel", "gemm", 30, 50, correlation=7),
        small_traces.event("kernel", "late", 110, 115),
        small_traces.event("kernel", "lost", 120, 125, correlation=99),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    trace = chrome_trace.load(tmp_path / "trace.json")
    assert list(zip(trace.kernels.name, trace.kernels.step, strict=True)) == [
        ("warm-up", -1),
        ("graph", 0),
        ("gemm", 0),
        ("late", 0),
        ("lost", 0),
    ]
    assert (
        list(trace.kernels.operators) == [[], [], [0], [], []]
        and trace.operators.device_ns.sum() == 20_000
    )


def stepped(steps: list[dict], *others: str) -> list[dict]:
    """Three steps with four kernels each, and events of these other categories."""
    work = [
        small_traces.event(category, "work", 25 * i + start, 25 * i + start + 9, correlation=i)
        for i in range(12)
        for category, start in (("cuda_runtime", 1), ("kernel", 11), ("cpu_op", 0))
        if category in others
    ]
    return [*steps, *work]


def marks(category: str, thread: int = 1) -> list[dict]:
    return [
        small_traces.event(category, f"ProfilerStep#{i}", 100 * i, 100 * i + 99, thread)
        for i in range(3)
    ]


@pytest.mark.parametrize(
    "events",
    [
        stepped(marks("Operator"), "kernel", "cuda_runtime", "cpu_op"),
        stepped(marks("cpu_op"), "kernel", "cuda_runtime", "cpu_op"),
        stepped(marks("user_annotation", 5), "kernel", "cuda_runtime", "cpu_op"),
        stepped(marks("user_annotation"), "kernel", "cuda_runtime"),
        stepped(marks("user_annotation"), "kernel"),
        stepped(marks("user_annotation") + marks("cpu_op"), "kernel", "cuda_runtime", "cpu_op"),
        stepped(marks("user_annotation") + marks("gpu_user_annotation"), "kernel", "cuda_runtime"),
    ],
    ids=["Operator", "cpu_op", "thread", "no operators", "kernels alone", "twice", "on the GPU"],
)
def test_steps_are_known_by_name_and_time(events, tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    trace = chrome_trace.load(tmp_path / "trace.json")
    assert list(trace.kernels.step) == [0] * 4 + [1] * 4 + [2] * 4 and len(trace.steps) == 3
    assert "ProfilerStep#1" not in set(trace.operators.name)


@pytest.mark.parametrize("written_again", [False, True])
def test_self_times_are_exact_at_the_times_of_an_epoch(written_again, tmp_path):
    """Forty operators around a product, in ns; a program that writes them again rounds them to
    quarters of a us.
    """
    event = '{"ph": "X", "cat": "cpu_op", "name": "%s", "pid": 1, "tid": 1, "ts": %s, "dur": %s}'
    rows = []
    for i in range(40):
        start = 1712345678901234000 + 20037 * i
        wait = 200 + 13 * i
        for name, ns, dur in (
            ("mine::block", start, 9999),
            ("aten::addmm", start + wait, 9999 - wait),
        ):
            rows.append(event % (name, f"{ns // 1000}.{ns % 1000:03}", dur / 1000))
    text = f'{{"traceEvents": [{", ".join(rows)}]}}'
    (tmp_path / "trace.json").write_text(json.dumps(json.loads(text)) if written_again else text)
    trace = chrome_trace.load(tmp_path / "trace.json")
    self_ns = trace.operators.groupby("name").self_cpu_ns.sum()
    inner_ns = sum(9999 - 200 - 13 * i for i in range(40))
    assert self_ns["aten::addmm"] == inner_ns
    assert self_ns["mine::block"] == 40 * 9999 - inner_ns


def test_an_operator_that_passes_its_work_on_is_counted_once(tmp_path):
    x = torch.ones(500, 500)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        (1 - x.zero_()).pow(1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    counted = set(load_kernels.load(tmp_path / "trace.json").table.name)
    assert counted == {"aten::fill_", "aten::sub", "aten::copy_"}


def test_a_call_that_calls_the_same_operator_again_is_not_counted_twice(tmp_path):
    """As autocast does: cat in cat, with the same shapes; the inner one does the work."""
    shapes = [[[2, 3], [2, 3]], []]
    calls = [(10, 40, shapes), (15, 35, shapes), (50, 55, [])]
    events = [
        small_traces.event("cpu_op", "aten::cat", start, end, shapes=shapes)
        for start, end, shapes in calls
    ]
    events.append(small_traces.event("user_annotation", "ProfilerStep#1", 0, 100))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    rows = list(chrome_trace.load(tmp_path / "trace.json").operators.itertuples())
    assert [(row.name, row.cpu_ns / 1e3, row.self_cpu_ns / 1e3) for row in rows] == [
        ("redispatch", 10, 10),
        ("aten::cat", 20, 20),
        ("aten::cat", 5, 5),
    ]


def test_busy_time_is_a_union_late_kernels_count_and_tables_are_plain_sums(gpu, cpu):
    assert len(gpu.steps) == 2, "the step that was cut off does not count"
    assert gpu.device_busy_ns() == 1000 * (30 + 5 + 35 + 30 + 59)
    assert gpu.step_ns() == [125_000, 60_000]

    tables = json.loads(json.dumps(chrome_trace.profile_tables(gpu)))
    assert (
        tables["launch"] == {"count": 6, "mean_delay_us": 15}
        and tables["memory_peak_bytes"] is None
    )
    assert (tables["profiled_steps"], tables["device_busy_us"], tables["step_us"]) == (
        2,
        159,
        [125, 60],
    )
    assert (
        tables["operators"][0]["name"] == "aten::mm"
        and tables["operators"][0]["self_device_us"] == 59
    )
    products = {
        row["phase"]: row["device_us"]
        for row in tables["kernels"]
        if (row["name"], row["span"]) == ("gemm", "attention")
    }
    assert products == {"forward": 30, "backward": 30}
    attention = chrome_trace.profile_tables(gpu, attention_only=True)
    assert {row["span"] for row in attention["operators"] + attention["kernels"]} == {"attention"}
    assert (
        attention["step_us"] == tables["step_us"]
        and sum(row["device_us"] for row in attention["kernels"]) == 70
    )

    tables = chrome_trace.profile_tables(cpu)
    assert sum(row["self_cpu_us"] for row in tables["operators"]) == pytest.approx(
        cpu.operators.self_cpu_ns.sum() / 1e3
    )
    assert sum(row["calls"] for row in tables["operators"]) == len(cpu.operators)
    assert (
        tables["memory_peak_bytes"] == cpu.memory.total_bytes.max() > 0 and tables["kernels"] == []
    )


@pytest.mark.parametrize(
    "shapes, span",
    [([[2, 8], [2, 8], []], "residual"), ([[2, 8], [8], []], "other"), ([[], [], []], "other")],
)
def test_a_residual_connection_adds_two_tensors_of_one_shape(tmp_path, shapes, span):
    step = small_traces.event("user_annotation", "ProfilerStep#0", 0, 20)
    addition = small_traces.event("cpu_op", "aten::add", 1, 9, shapes=shapes)
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [step, addition]}))
    assert list(chrome_trace.load(tmp_path / "trace.json").operators.span) == [span]


def test_the_peak_of_a_gpus_trace_is_that_of_the_gpus_allocator(tmp_path):
    content = gpu_trace()
    for device, total in ((0, 900), (1, 500), (1, 300)):
        told = {"Bytes": 100, "Addr": 1, "Total Allocated": total, "Device Type": device}
        row = {"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": 1015.0, "args": told}
        content["traceEvents"].append(row)
    (tmp_path / "trace.json").write_text(json.dumps(content))
    trace = chrome_trace.load(tmp_path / "trace.json")
    assert len(trace.memory) == 3
    assert chrome_trace.profile_tables(trace)["memory_peak_bytes"] == 500


def test_steps_of_several_processes_in_one_file_are_refused(tmp_path):
    events = [each | {"pid": rank} for rank in (0, 1) for each in rank_trace(rank)["traceEvents"]]
    (tmp_path / "merged.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(
        UsageError,
        match=r"merged\.json holds the steps of several processes: give the trace of one of them",
    ):
        chrome_trace.load(tmp_path / "merged.json")


def test_kernels_of_a_trace_without_steps_have_their_spans_and_operators(tmp_path):
    events = gpu_trace()["traceEvents"]
    whole = [event for event in events if not event["name"].startswith("ProfilerStep#")]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": whole}))
    kernels = chrome_trace.load(path).kernels
    assert list(kernels.span[1:4]) == ["attention", "residual", "attention"]
    assert kernels.launch_delay_ns[1] == 6_000 and len(kernels.operators[1]) == 2
