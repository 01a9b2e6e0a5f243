"""Bytes and FLOPs of each kernel by formula: against its tensors, by hand, and in FLOP counts."""

from collections import Counter

from common.analysis.formulas import flops
from common.config import ModelConfig
from common.training import flop_counters
from tests import models
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, interpreted
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

pytest.importorskip("triton")
from version3_triton import kernels, tiny_llama_v3
from version3_triton.kernels import costs

CONFIG = models.config()
ALL_OFF = dict.fromkeys(tiny_llama_v3.SWITCHES, False)


@interpreted
def test_bytes_by_formula_are_those_of_the_tensors_that_kernels_get(monkeypatch):
    """Every tensor counts once, the logits twice because they are read and written. The formula leaves small tensors out."""
    from triton.runtime.interpreter import InterpretedFunction

    left_out = {"weight", "rstd", "by_part", "dweight", "cos", "sin", "lse", "d", "targets"}
    left_out |= {"negative_losses", "classes", "scale"}
    given: Counter = Counter()

    def note(self, *arguments, grid, warmup, **constants):
        tensors = {
            tensor.data_ptr(): tensor.numel() * tensor.element_size() * (2 if name == "logits_ptr" else 1)
            for name, tensor in zip(self.arg_names, arguments, strict=False)
            if isinstance(tensor, torch.Tensor) and name.removesuffix("_ptr") not in left_out
        }
        given[self.fn.__name__] += sum(tensors.values())
        return original(self, *arguments, grid=grid, warmup=warmup, **constants)

    original = InterpretedFunction.run
    monkeypatch.setattr(InterpretedFunction, "run", note)
    models.build(tiny_llama_v3).loss(*models.batch()).backward()
    expected: Counter = Counter()
    for (kernel, _), cost in costs.training_step(CONFIG, 2, 17, 4).items():
        expected[kernel] += cost.bytes or 0
    assert given == expected


def test_costs_under_autocast_by_hand():
    """Bytes by the table of the module at e = 2, with a residual stream in float32; FLOPs of the pairs that are not masked."""
    config, e, tokens = ModelConfig(num_key_value_heads=4), 2, 8 * 128
    layers, d, h, k, dh, f, v = 4, 256, 8, 4, 32, 512, 1000
    product = 2 * d * 8 * 128 * 129 // 2 * layers
    rotated = tokens * layers * 2 * dh * (h + k) * e
    found = {key: (cost.bytes, cost.flops) for key, cost in costs.training_step(config, 8, 128, e).items()}
    assert found == {
        ("_rms_norm_forward", "forward"): (tokens * d * (4 + e + 2 * layers * (8 + 2 * e)), None),
        ("_rms_norm_backward", "backward"): (tokens * d * (8 + e + (2 * layers - 1) * (12 + 2 * e) + 8 + 2 * e), None),
        ("_rms_norm_dweight", "backward"): (None, None),
        ("_rope_forward", "forward"): (rotated, None), ("_rope_forward", "backward"): (rotated, None),
        ("_flash_attention_forward", "forward"): (tokens * layers * dh * (2 * h + 2 * k) * e, 2 * product),
        ("_flash_attention_backward_queries", "backward"): (tokens * layers * dh * (4 * h + 2 * k) * e, 3 * product),
        ("_flash_attention_backward_keys", "backward"): (tokens * layers * dh * (2 * h + 4 * k) * e, 4 * product),
        ("_swiglu_forward", "forward"): (tokens * layers * 3 * f * e, None),
        ("_swiglu_backward", "backward"): (tokens * layers * 5 * f * e, None),
        ("_linear_cross_entropy_loss_and_gradient", "forward"): (tokens * 2 * v * e, None),
    }  # fmt: skip


def test_flops_are_attentions_where_its_kernel_runs_and_nowhere_else(monkeypatch):
    ids = torch.zeros(2, 16, dtype=torch.long, device=DEVICE)
    product = 2 * 2 * 16 * 16 * CONFIG.hidden_size * CONFIG.num_layers
    on, off = (models.build(tiny_llama_v3, ALL_OFF | {"triton-attention": value}) for value in (True, False))
    nothing = {"forward": 0, "backward": 0}
    assert on.kernel_flops(ids) == {"forward": 2 * product, "backward": 7 * product} and off.kernel_flops(ids) == nothing
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert on.kernel_flops(ids) == nothing


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
    gradients = 2 * 2 * 2 * 17 * CONFIG.hidden_size * CONFIG.vocab_size  # of x and of the weight, in the forward pass
    assert own == {"forward": plain["forward"] + gradients, "backward": plain["backward"] - gradients}


@runs_kernels
def test_deepspeed_counts_one_forward_pass(tmp_path):
    pytest.importorskip("deepspeed")
    first, third = (
        flop_counters.counted_by_deepspeed(models.build(version, device=DEVICE), models.batch(DEVICE), tmp_path / "report.txt")
        for version in (tiny_llama_v1, tiny_llama_v3)
    )
    assert third["forward"] == pytest.approx(flops.forward(CONFIG, 2, 17, causal=False)["total"], rel=0.01)
    assert third["forward"] <= first["forward"] and third["backward"] == 2 * third["forward"]
