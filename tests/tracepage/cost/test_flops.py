"""Parameters and FLOPs by formula against the model, PyTorch's counter and the masked pairs."""

from collections import Counter

from common.config import ModelConfig
from tests.operators import model_and_batch
from tracepage.cost import flops
from version1_pytorch_baseline import tiny_llama_v1 as v1

import torch
from torch.utils.flop_counter import FlopCounterMode

PARTS = {"embed_tokens": "embedding", "self_attn": "attention", "mlp": "mlp", "norm": "norms"}


def test_parameters_by_part(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = v1.TinyLlama(config)
    counted = Counter()
    for name, parameter in model.named_parameters():
        part = next(part for key, part in PARTS.items() if key in name)
        counted[part] += parameter.numel()
    assert flops.parameters(config) == counted | {"total": counted.total()}


def test_flop_counter_agrees_with_the_full_count_forward_and_backward(
    config: ModelConfig, shape
) -> None:
    model, *batch = model_and_batch(config, shape)
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(*batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    expected = flops.training_step(config, *shape, causal=False)
    assert forward.get_total_flops() == expected["forward"]
    assert backward.get_total_flops() == expected["backward"]
    assert expected["total"] == expected["forward"] + expected["backward"]
    assert flops.training_step(config, *shape) == flops.training_step(config, *shape, causal=True)


def test_causal_count_leaves_out_exactly_the_masked_pairs(
    config: ModelConfig, shape: tuple[int, int]
) -> None:
    batch, length = shape
    full, causal = (flops.forward(config, batch, length, causal=causal) for causal in (False, True))
    masked = int(torch.ones(length, length).triu(diagonal=1).sum())  # what V1's mask fills
    # multiply and add; for the score and for its use
    flops_per_pair = 2 * 2 * config.num_attention_heads * config.head_dim
    assert full["total"] - causal["total"] == config.num_layers * batch * masked * flops_per_pair
    assert all(full[part] == causal[part] for part in ("projections", "mlp", "head"))
