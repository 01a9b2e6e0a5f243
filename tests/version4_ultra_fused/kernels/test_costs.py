"""Bytes and FLOPs of each kernel by formula: by hand, and in FLOP counts."""

from common.analysis.formulas import flops
from common.config import ModelConfig
from common.training import flop_counters
from tests.conftest import runs_kernels
from tests.oracle import DEVICE

import pytest
import torch

pytest.importorskip("triton")
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.kernels import costs, elementwise, matmul, matmul_norm_backward, short_attention

# Sizes of tensors are multiples of 64, the alignment of the optimizer's buffers.
CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80
)
BATCH, LENGTH = 2, 17
ALL = 1 << 30  # the most elements of a product with an epilogue: any product has one


def allow(monkeypatch, most: int, multiplications: int) -> None:
    """Products of so many elements have an epilogue, and those of so many multiplications that of a norm's gradient."""
    for module in (matmul, elementwise, matmul_norm_backward, short_attention, costs):
        monkeypatch.setattr(module, "largest", lambda epilogue, depth=1: multiplications // depth if epilogue == "norm" else most)


def test_bytes_and_flops_by_hand():
    """At e = 2 with all epilogues, FLOPs of the pairs that are not masked; kernels that did not run have their cost, too."""
    tokens, layers, d, f, v, head = 8 * 128, 4, 256, 512, 1000, 32
    rows, c = tokens * layers, (8 + 2 * 4) * head  # c: columns of q, k and v
    pairs, matrices = 2 * d * 8 * 128 * 129 // 2 * layers, layers * d * (c + d + 3 * f)
    launched = {("_adamw", "backward"): layers, ("_rms_norm_backward", "backward"): 1}
    launched |= {("_matmul_norm_backward", "backward"): 2 * layers, ("_short_attention_backward", "backward"): layers}
    found = costs.training_step(ModelConfig(num_key_value_heads=4), 8, 128, 2, launched)
    assert {key: cost.bytes for key, cost in found.items() if cost.bytes is not None} == {
        # The stream and its sum in 4 bytes; the branch, the result and the copy in 2.
        ("_rms_norm_forward", "forward"): tokens * d * (4 + 2 + 2 + 2 * layers * (4 + 2 + 4 + 2 + 2)),
        ("_rms_norm_backward", "backward"): tokens * d * 3 * 2,  # of the last norm: a gradient, the copy, and the result
        ("_matmul_norm_backward", "backward"): 2 * (rows * (6 * d + 2 * f + c) + layers * d * (2 * f + c)) + 2 * tokens * d,
        ("_matmul", "forward"): 2 * (rows * (d + c + d + 3 * f) + layers * d * (c + 2 * f)),
        ("_rotate", "forward"): 2 * rows * head * 2 * (8 + 4),
        ("_rotate", "backward"): 2 * rows * head * 2 * (8 + 2 * 4),
        ("_swiglu", "forward"): 2 * rows * 3 * f,
        ("_swiglu_backward", "backward"): 2 * rows * 5 * f,
        ("_quantize", "forward"): (2 + 1 + 1) * (rows * 3 * d + matrices),
        ("_quantize", "backward"): (2 + 1 + 1) * rows * (2 * d + c),
        ("_swiglu_quantized", "forward"): rows * f * (2 * 2 + 1 + 1),
        ("_swiglu_quantized", "backward"): rows * f * (3 * 2 + 2 * (1 + 1)),
        ("_flash_attention_forward", "forward"): 2 * rows * head * (2 * 8 + 2 * 4),
        ("_flash_attention_backward_queries", "backward"): 2 * rows * head * (4 * 8 + 2 * 4),
        ("_flash_attention_backward_keys", "backward"): 2 * rows * head * (2 * 8 + 4 * 4),
        ("_short_attention_backward", "backward"): 2 * rows * head * 4 * (8 + 4),
        ("_cross_entropy", "forward"): 2 * tokens * 2 * v,
        ("_embedding_backward", "backward"): 4 * tokens * d,
        ("_adamw", "backward"): 28 * matrices,
        ("_adamw", "optimizer"): 30 * d * (v + 2 * layers + 1),
    }  # fmt: skip
    assert found["_matmul", "forward"].flops == 2 * rows * d * (c + 2 * f)
    assert found["_matmul_norm_backward", "backward"].flops == 2 * rows * d * (c + 2 * f)
    assert found["_flash_attention_forward", "forward"].flops == 2 * pairs
    assert found["_short_attention_backward", "backward"].flops == 5 * pairs


def counted(dtype: torch.dtype) -> dict[str, int]:
    """FLOPs by PyTorch's counter and by `kernel_flops`."""
    ids = torch.randint(61, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        return flop_counters.counted_by_torch(tiny_llama_v4.TinyLlama(CONFIG).to(DEVICE), (ids[0], ids[1]))


def product(length: int) -> int:
    return 2 * BATCH * length * length * CONFIG.hidden_size * CONFIG.num_layers


@runs_kernels
@pytest.mark.parametrize("dtype, most, repeated", [(torch.float32, ALL, 3), (torch.float16, 0, 1), (torch.float16, ALL, 1)])
def test_every_product_is_counted_once(monkeypatch, dtype, most, repeated):
    """The formula's count, and the products that attention's backward pass repeats: the scores, or Version 3's three."""
    allow(monkeypatch, most, most)
    found, once = counted(dtype), flops.forward(CONFIG, BATCH, LENGTH, causal=False)["total"]
    assert found == {"forward": once, "backward": 2 * once + repeated * product(LENGTH)}
