"""Kernels, or operators that do work, in traces and profiles of torch.profiler."""

import json

from tests.kernel_files import launch_rows, write_gpu_trace
from tests.small_traces import STEPS, event, gpu_trace, write_profile
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, load_kernels, pytorch
from tracepage.views import launches

import pytest


def test_a_trace_gives_the_kernels_of_its_steps(tmp_path):
    found = load_kernels.load(write_gpu_trace(tmp_path / "trace.json"))
    assert (found.kind, found.steps) == ("pytorch-trace", 2)
    expected = [
        ("gemm", 0, 30e3),
        ("add", 30e3, 5e3),
        ("gemm", 40e3, 30e3),
        ("Memset (Device)", 65e3, 10e3),
    ]
    assert launch_rows(found)[:4] == expected
    assert list(found.table.category) == [
        "kernel",
        "kernel",
        "kernel",
        "memset",
        "kernel",
        "kernel",
    ]


def test_launches_outside_steps_are_counted_and_a_trace_of_these_is_refused(tmp_path):
    content = gpu_trace()
    content["traceEvents"] += [
        event("cuda_runtime", "cudaLaunchKernel", 170, 171, correlation=98),
        event("kernel", "outside", 191, 203, 0, correlation=98),
    ]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    assert load_kernels.load(tmp_path / "trace.json").notes == (
        "not counted: 2 kernels of 47 us that no profiled step launched",
    )
    content["traceEvents"] = [
        each for each in content["traceEvents"] if "launch" not in each["name"].lower()
    ]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="no profiled step launched any of its 8 kernels$"):
        load_kernels.load(tmp_path / "trace.json")


def test_trace_and_profile_of_one_run_agree(tmp_path, cpu_trace):
    for trace in (write_gpu_trace(tmp_path / "trace.json"), cpu_trace):
        write_profile(tmp_path / "profile_1.json", trace)
        sums = [
            {
                row.name: (
                    row.category,
                    row.calls,
                    pytest.approx(row.total_ns, rel=1e-3, abs=20 * row.calls),
                )
                for row in rows.itertuples()
            }
            for rows in (
                launches.summary(load_kernels.load(path))
                for path in (trace, tmp_path / "profile_1.json")
            )
        ]
        assert sums[0] == sums[1]


def test_operators_of_a_cpu_are_those_that_work(cpu_trace):
    found, trace = load_kernels.load(cpu_trace), chrome_trace.load(cpu_trace)
    assert found.are_operators and found.notes == (pytorch.OPERATORS_NOTE,) and found.steps == STEPS
    names = set(found.table.name)
    assert {
        "aten::mm",
        "aten::bmm",
        "aten::silu",
        "aten::add",
        "aten::embedding_dense_backward",
    } <= names
    assert not names & {
        "aten::view",
        "aten::empty",
        "aten::linear",
        "aten::matmul",
        "aten::t",
        "MmBackward0",
        "autograd engine",
    }
    products = trace.operators[
        trace.operators.name.isin(["aten::mm", "aten::bmm"]) & (trace.operators.step >= 0)
    ]
    assert found.table.name.isin(["aten::mm", "aten::bmm"]).sum() == len(products)
    busy = launches.gaps(found)
    assert (
        busy.busy_ns + busy.idle_ns.sum() == pytest.approx(busy.window_ns)
        and 0 < busy.busy_ns < busy.window_ns
    )


def test_frames_of_torch_compile_are_no_operators(tmp_path):
    names = [
        "TorchDynamo Cache Lookup",
        "Torch-Compiled Region: 0/0",
        "Pregraph bytecode",
        "CompiledFunction",
        "aten::mm",
    ]
    events = [event("cpu_op", name, 10 * i, 10 * i + 5) for i, name in enumerate(names)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = load_kernels.load(tmp_path / "trace.json")
    assert list(found.table.name) == ["CompiledFunction", "aten::mm"]
    assert found.notes == (pytorch.OPERATORS_NOTE, pytorch.COMPILED_NOTE)


def test_operators_of_a_cpu_beside_a_gpu_that_is_not_used(tmp_path):
    """Its runtime is asked, and launches nothing."""
    events = [
        event("cpu_op", "aten::mm", 0, 5),
        event("cuda_runtime", "cudaDeviceSynchronize", 6, 7),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert load_kernels.load(tmp_path / "trace.json").notes == (pytorch.OPERATORS_NOTE,)
