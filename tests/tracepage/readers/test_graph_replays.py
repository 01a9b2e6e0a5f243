"""Kernels of a replayed graph get the spans and operators of the eager step that was captured."""

import json

from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, graph_replays

import pytest


def event(category: str, name: str, start: float, duration: float, **args) -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def load(path, *events: dict) -> chrome_trace.Trace:
    path.write_text(json.dumps({"traceEvents": events}))
    return chrome_trace.load(path)


@pytest.fixture
def eager(tmp_path):
    """A step with a norm of one kernel and an attention of two, the second launched by an inner
    operator.
    """
    return load(
        tmp_path / "eager.json",
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("user_annotation", "norm", 1, 20),
        event("cpu_op", "aten::mul", 2, 10, **{"Input Dims": [[4]]}),
        event("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=1),
        event("kernel", "mul", 10, 5, correlation=1),
        event("user_annotation", "attention", 30, 40),
        event("cpu_op", "aten::matmul", 31, 30),
        event("cpu_op", "aten::mm", 32, 20),
        event("cuda_runtime", "cudaLaunchKernel", 33, 1, correlation=2),
        event("kernel", "gemm", 40, 10, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 55, 1, correlation=3),
        event("kernel", "mul", 60, 5, correlation=3),
    )


def replay(tmp_path, *names: str) -> chrome_trace.Trace:
    """Two steps, each a copy of the batch and a graph with these kernels of 2, 4, 6, ... us."""
    events = []
    for step in range(2):
        start = 1000 * (step + 1)
        events += [
            event("user_annotation", f"ProfilerStep#{step}", start, 500),
            event("cpu_op", "aten::copy_", start + 1, 5),
            event("cuda_runtime", "cudaMemcpyAsync", start + 2, 1, correlation=start),
            event("gpu_memcpy", "Memcpy", start + 5, 1, correlation=start),
            event("cuda_runtime", "cudaGraphLaunch", start + 10, 5, correlation=start + 1),
        ]
        events += [
            event("kernel", name, start + 20 + 20 * i, 2 * (i + 1), correlation=start + 1)
            for i, name in enumerate(names)
        ]
    return load(tmp_path / "captured.json", *events)


def test_kernels_get_span_phase_and_operators(tmp_path, eager):
    trace = graph_replays.attribute(replay(tmp_path, "mul", "gemm", "mul"), eager)
    kernels = trace.kernels[trace.kernels.graph.notna()]
    assert list(kernels.span) == ["norm", "attention", "attention"] * 2 and set(kernels.phase) == {
        "forward"
    }
    assert list(kernels.step) == [0, 0, 0, 1, 1, 1]
    assert kernels.launch_delay_ns.notna().sum() == 2, "one call launches all kernels of a graph"
    times = trace.operators[trace.operators.step == 1].set_index("name")
    assert times.self_device_ns.to_dict() == {
        "aten::copy_": 1000,
        "aten::mul": 2000,
        "aten::matmul": 6000,
        "aten::mm": 4000,
    }
    assert times.device_ns.to_dict() == {
        "aten::copy_": 1000,
        "aten::mul": 2000,
        "aten::matmul": 10000,
        "aten::mm": 4000,
    }
    assert times.input_shapes["aten::mul"] == "[[4]]" and times.cpu_ns["aten::mm"] == 0


@pytest.mark.parametrize(
    "names, spans",
    [
        (["mul", "fill", "gemm", "mul"], ["norm", "other", "attention", "attention"]),
        (["gemm", "mul", "mul"], ["attention", "norm", "attention"]),
        (["gemm", "mul"], ["attention", "attention"]),
    ],
    ids=[
        "a kernel that the eager step has not",
        "branches that change places",
        "a kernel is missing: the order decides",
    ],
)
def test_kernels_that_differ_from_the_eager_steps(tmp_path, eager, names, spans):
    trace = graph_replays.attribute(replay(tmp_path, *names), eager)
    assert list(trace.kernels[trace.kernels.step == 0].span) == ["other", *spans], (
        "the copy of the batch, then these"
    )


@pytest.mark.parametrize(
    "names, lost",
    [
        (["mul", "gemm", "mul"], []),
        (["mul"], ["recorded 1 kernels"]),
        (["mul", "Memcpy DtoD", "Memset"], ["recorded 1 kernels"]),
        ([], ["recorded 0 kernels"]),
    ],
)
def test_kernels_that_the_profiler_lost_are_told(tmp_path, eager, names, lost):
    found = graph_replays.lost_kernels(replay(tmp_path, *names), eager)
    assert len(found) == len(lost) and all(
        each in found[0] and "the eager step has 3" in found[0] for each in lost
    )


def test_a_trace_of_the_same_work_names_the_operators_of_graphs(tmp_path, eager):
    """Also one without steps, or with several, of which the first counts."""
    path = tmp_path / "captured.json"
    captured = replay(tmp_path, "mul", "gemm", "mul")
    whole = json.loads((tmp_path / "eager.json").read_text())["traceEvents"]
    unmarked = [row for row in whole if not row["name"].startswith("ProfilerStep")]
    second = [row | {"ts": row["ts"] + 500} for row in whole if row["cat"] != "kernel"]
    for row in second:
        row["args"] = {key: 10 * value for key, value in row["args"].items() if key != "Input Dims"}
    for events in (whole, unmarked, whole + second):
        (tmp_path / "other.json").write_text(json.dumps(events))
        trace = graph_replays.with_operators_of(path, captured, tmp_path / "other.json")
        replayed = trace.kernels[trace.kernels.graph.notna()]
        names = [trace.operators.name[chain[0]] for chain in replayed.operators]
        assert names == ["aten::mul", "aten::mm", "aten::matmul"] * 2 and trace.notes == ()


def test_kernels_that_the_other_trace_has_not_are_counted(tmp_path, eager):
    captured = replay(tmp_path, "mul", "fill", "gemm", "mul")
    trace = graph_replays.with_operators_of(
        tmp_path / "captured.json", captured, tmp_path / "eager.json"
    )
    [note] = trace.notes
    assert note.startswith("2 of 8 kernels of graphs have no operator in")


def test_a_capture_that_explains_nothing_is_refused(tmp_path, eager):
    path, other = tmp_path / "captured.json", tmp_path / "eager.json"
    captured = replay(tmp_path, "fill", "scan")
    with pytest.raises(UsageError, match="no kernel of a graph in .*captured.json is in .*eager"):
        graph_replays.with_operators_of(path, captured, other)
    with pytest.raises(UsageError, match="eager.json has no kernels of a graph"):
        graph_replays.with_operators_of(other, eager, path)
    load(tmp_path / "cpu.json", event("cpu_op", "aten::mm", 0, 5))
    with pytest.raises(UsageError, match="no operator launches a kernel in .*cpu.json"):
        graph_replays.with_operators_of(path, captured, tmp_path / "cpu.json")
    path.with_name("eager_captured.json").write_text("[]")
    with pytest.raises(UsageError, match="captured.json has its eager trace beside it"):
        graph_replays.with_operators_of(path, captured, other)


@pytest.mark.parametrize("key", ["str", "name", "annotation", "module_fqn"])
def test_an_annotation_of_a_node_is_the_span_of_its_kernel(tmp_path, key):
    node = event("kernel", "gemm", 20, 5, correlation=1)
    node["args"] |= {"graph node id": 9, key: "layers.3.attention.wq"}
    other = node | {"ts": 30, "args": node["args"] | {"graph node id": 0}}
    trace = load(
        tmp_path / "annotated.json",
        event("cpu_op", "aten::copy_", 0, 5),
        event("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=1),
        node,
        other,
    )
    assert list(trace.kernels.span) == ["layers.*.attention.wq", "other"]
