"""Devices: memory and its limits, out of memory in its forms, and torch.compile where it does not
work.
"""

import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

from common import device as devices
from tracepage.errors import UsageError

import pytest
import torch

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_an_allocation_past_the_limit_is_out_of_memory(run_script):
    code = (
        "import torch; from common import device as d; cpu = torch.device('cpu'); d.limit_memory(cpu, 4096)\n"
        "torch.ones(2**26)\n"
        "try: torch.ones(2**31)\n"
        "except Exception as error: print(d.is_out_of_memory(error))"
    )
    assert run_script("-c", code).stdout == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("high_water", ["VmHWM:     2048 kB\n", ""])
def test_a_peak_that_cannot_be_reset_is_that_of_the_whole_process(
    monkeypatch, tmp_path, high_water
):
    """As in gVisor, whose status has no VmHWM, and where clear_refs cannot be written."""
    (tmp_path / "status").write_text(f"VmSize:     9 kB\n{high_water}VmRSS:     9 kB\n")
    monkeypatch.setattr(devices, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(devices, "_CLEAR", tmp_path)
    devices.reset_peak_memory(CPU)
    memory = devices.peak_memory(CPU)
    assert memory["kind"] == "process RSS since its start"
    assert memory["peak_mib"] == 2 if high_water else memory["peak_mib"] > 50

    monkeypatch.setattr(devices, "_CLEAR", tmp_path / "clear_refs")
    devices.reset_peak_memory(CPU)
    assert (devices.peak_memory(CPU)["kind"] == "process RSS") == bool(high_water)


def test_a_missing_compiler_is_a_line(monkeypatch):
    def fail(function):
        raise RuntimeError("no compiler\nmore of it")

    monkeypatch.setattr(devices.torch, "compile", fail)
    assert devices.compile_problem(CPU) == "torch.compile does not work here: no compiler"
    with pytest.raises(UsageError, match="torch.compile does not work here: no compiler"):
        devices.compiled(torch.sin, CPU)


@pytest.mark.parametrize("name", devices.COMPILE_OFF[:2])
def test_a_torch_compile_that_compiles_nothing_is_a_line(run_script, name):
    code = "import torch; from common.device import compile_problem as problem\n"
    code += "print(problem(torch.device('cpu')))"
    printed = run_script("-c", code, **{name: "1"}).stdout
    assert printed.startswith("torch.compile compiles nothing here: unset ") and name in printed


@pytest.mark.gpu
def test_captured_work_is_done_again_where_it_was():
    total = torch.zeros(3, device="cuda")
    replay = devices.capture_graph(lambda: total.add_(1))
    before = total.clone()
    replay()
    assert torch.equal(total, before + 1)
    total.fill_(5)  # it reads what is there now
    replay()
    replay()
    assert torch.equal(total, torch.full_like(total, 7))
    devices.capture_graph(lambda: total.add_(1), times=4)()
    assert total[0] == 7 + 3 + 4  # and the three of its warm-up


@pytest.mark.gpu
def test_garbage_that_holds_an_eager_step_does_not_break_a_capture():
    """Gradients are added up on the stream of the oldest autograd graph that is left: here the
    default stream.
    """
    weight = torch.ones(8, 8, device="cuda", requires_grad=True)

    def step() -> torch.Tensor:
        loss = (weight @ weight).sum()
        loss.backward()
        return loss

    with devices.stream_before_capture():
        step()
    cycle = [step()]
    cycle.append(cycle)
    del cycle
    weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with devices.capturing(graph, collectives=False):
        step()
    graph.replay()
    assert torch.equal(weight.grad, torch.full_like(weight, 16))


@pytest.mark.parametrize(
    "inside",
    [ValueError("it waits"), torch.OutOfMemoryError(), KeyboardInterrupt(), None],
    ids=repr,
)
def test_a_capture_ends_with_the_error_inside_it(monkeypatch, inside):
    @contextmanager
    def graph(*_, **__):
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with (
        pytest.raises(type(inside) if inside else RuntimeError) as caught,
        devices.capturing(SimpleNamespace(), False),
    ):
        if inside:
            raise inside
    assert caught.value is inside or inside is None


@pytest.mark.parametrize(
    "allowed, architecture, expected",
    [(True, "gfx942:sramecc+", "1"), (True, "gfx90a", None), (False, "gfx942", None)],
)
def test_tf32_on_an_mi300_also_needs_hipblaslts_own_variable(
    monkeypatch, allowed, architecture, expected
):
    monkeypatch.delenv("HIPBLASLT_ALLOW_TF32", raising=False)
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    try:
        devices.configure(torch.device("cuda"), 0, allow_tf32=allowed)
        assert os.environ.pop("HIPBLASLT_ALLOW_TF32", None) == expected
    finally:
        devices.configure(CPU, 0)


def test_only_a_deterministic_run_changes_pytorchs_kernels_and_workspace(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for deterministic, workspace in ((False, None), (True, ":4096:1")):
        devices.configure(CPU, 0, deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.utils.deterministic.fill_uninitialized_memory != deterministic
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
    devices.configure(CPU, 0)
    assert not torch.are_deterministic_algorithms_enabled()
