"""FLOPs of the kernels in FLOP counts."""

from common.training import flop_counters
from tests import models
from tests.conftest import runs_kernels
from tests.oracle import DEVICE
from tracepage.cost import flops

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import kernels, tiny_llama_v3

CONFIG = models.config()
ALL_OFF = dict.fromkeys(tiny_llama_v3.SWITCHES, False)


def test_flops_are_attentions_where_its_kernel_runs_and_nowhere_else(monkeypatch):
    ids = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)
    product = 2 * 2 * 16 * 16 * CONFIG.hidden_size * CONFIG.num_layers
    on, off = (
        models.build(tiny_llama_v3, ALL_OFF | {"triton-attention": value}, device=DEVICE)
        for value in (True, False)
    )
    nothing = {"forward": 0, "backward": 0}
    assert (
        on.kernel_flops(ids) == {"forward": 2 * product, "backward": 7 * product}
        and off.kernel_flops(ids) == nothing
    )
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    switches = ALL_OFF | {"triton-attention": True}
    assert models.build(tiny_llama_v3, switches).kernel_flops(ids) == nothing


def counted(*on: str) -> dict[str, int]:
    """FLOPs by PyTorch's counter, with these switches on."""
    model = models.build(tiny_llama_v3, ALL_OFF | dict.fromkeys(on, True), device=DEVICE)
    return flop_counters.counted_by_torch(model, models.batch(DEVICE))


@runs_kernels
def test_the_attention_kernel_is_counted():
    """As PyTorch's own fused attention; its two backward kernels compute two products twice."""
    plain, own = counted(), counted("triton-attention")
    product = 2 * 2 * 17 * 17 * CONFIG.hidden_size * CONFIG.num_layers  # B, S, S
    assert own["forward"] == plain["forward"] == flops.forward(CONFIG, 2, 17, causal=False)["total"]
    assert own["backward"] == plain["backward"] + 2 * product


@runs_kernels
def test_the_loss_is_counted_where_it_computes():
    plain, own = counted(), counted("triton-loss")
    # of x and of the weight, in the forward pass
    gradients = 2 * 2 * 2 * 17 * CONFIG.hidden_size * CONFIG.vocab_size
    assert own == {
        "forward": plain["forward"] + gradients,
        "backward": plain["backward"] - gradients,
    }
