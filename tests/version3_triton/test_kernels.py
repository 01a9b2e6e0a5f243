"""The operations of Version 3 as plain functions: each is its kernel, or PyTorch's where the kernel
is off or cannot run.
"""

from collections import Counter

from tests import models
from tests.conftest import run_options
from tests.oracle import DEVICE

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import kernels, tiny_llama_v3
from version3_triton.kernels import reference

CPU = torch.device("cpu")
NAMES = kernels.Operations._fields
OPERATIONS = [operation for operations in kernels.SWITCHES.values() for operation in operations]
# of a loss
CALLS = {
    "rms_norm": 1,
    "add_rms_norm": 4,
    "apply_rope": 2,
    "attention": 2,
    "swiglu": 2,
    "linear_cross_entropy": 1,
}


@pytest.fixture
def called(monkeypatch) -> Counter:
    """How often each operation was a kernel; PyTorch computes in its place."""
    calls: Counter = Counter()

    def stand_in(name: str):
        def kernel(*arguments):
            calls[name] += 1
            return getattr(reference, name)(*arguments)

        return kernel

    monkeypatch.setattr(kernels, "KERNELS", kernels.Operations._make(map(stand_in, NAMES)))
    return calls


def loss(model: torch.nn.Module) -> None:
    model.loss(*models.batch(DEVICE))


def test_every_operation_has_a_switch_and_every_switch_is_the_versions():
    assert sorted(OPERATIONS) == sorted(NAMES) and len(set(OPERATIONS)) == len(OPERATIONS)
    assert {*kernels.SWITCHES, "fused-adamw"} == tiny_llama_v3.SWITCHES.keys()


@pytest.mark.parametrize("switch", [None, *kernels.SWITCHES])
def test_every_operation_is_a_kernel_unless_a_switch_gives_it_to_pytorch(called, switch):
    off = [] if switch is None else [{name: name != switch for name in kernels.SWITCHES}]
    loss(models.build(tiny_llama_v3, *off, device=DEVICE))
    assert called == {
        name: calls for name, calls in CALLS.items() if name not in kernels.SWITCHES.get(switch, ())
    }


def test_two_models_side_by_side_have_their_own_operations(called):
    off = dict.fromkeys(tiny_llama_v3.SWITCHES, False)
    norms, losses = (
        models.build(tiny_llama_v3, off | {switch: True}, device=DEVICE)
        for switch in ("triton-norm", "triton-loss")
    )
    ids, _ = models.batch(DEVICE)
    of_norms = {"rms_norm": 1, "add_rms_norm": 4}
    for run, expected in (
        (lambda: loss(norms), of_norms),
        (lambda: loss(losses), {"linear_cross_entropy": 1}),
        (lambda: loss(norms), of_norms),
        (lambda: losses(ids), {}),
        (lambda: norms(ids), of_norms),  # a forward pass has no loss
    ):
        called.clear()
        run()
        assert called == expected


def test_a_replaced_operation_is_of_one_model_also_after_an_error(called):
    table = kernels.KERNELS._replace(swiglu=reference.swiglu)
    model = tiny_llama_v3.TinyLlama(models.config(), operations=table).to(DEVICE)
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 4, device=DEVICE))  # token ids are integers: the pass ends early
    assert not called
    loss(model)
    assert called == {name: calls for name, calls in CALLS.items() if name != "swiglu"}
    called.clear()
    loss(models.build(tiny_llama_v3, device=DEVICE))
    assert called == CALLS


def test_where_no_kernel_can_run_every_operation_is_pytorchs(called, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    switches = kernels.available(run_options(tiny_llama_v3))
    assert switches == dict.fromkeys(tiny_llama_v3.SWITCHES, False) | {
        "fused-adamw": True,
        "no-kernels": "triton is not installed",
    }
    assert "triton is not installed" in capsys.readouterr().err
    loss(models.build(tiny_llama_v3, switches, device=DEVICE))
    loss(models.build(tiny_llama_v3, device=DEVICE))  # a model that nobody asked what is available
    assert not called
