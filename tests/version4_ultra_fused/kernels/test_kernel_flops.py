"""FLOPs of the kernels in FLOP counts."""

from common.config import ModelConfig
from common.training import flop_counters
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, HOPPER
from tracepage.cost import flops

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.kernels import (
    elementwise,
    matmul,
    short_attention,
)

# Sizes of tensors are multiples of 64, the alignment of the optimizer's buffers.
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=80,
)
BATCH, LENGTH = 2, 17
ALL = 1 << 30  # the most elements of a product with an epilogue: any product has one


def allow(monkeypatch, most: int, multiplications: int) -> None:
    """Products of so many elements have an epilogue, and those of so many multiplications that of a
    norm's gradient.
    """
    for module in (matmul, elementwise, short_attention):
        monkeypatch.setattr(
            module,
            "largest",
            lambda epilogue, depth=1: multiplications // depth if epilogue == "norm" else most,
        )


def counted(dtype: torch.dtype) -> dict[str, int]:
    """FLOPs by PyTorch's counter and by `kernel_flops`."""
    ids = torch.randint(61, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        return flop_counters.counted_by_torch(
            tiny_llama_v4.TinyLlama(CONFIG).to(DEVICE), (ids[0], ids[1])
        )


def product(length: int) -> int:
    return 2 * BATCH * length * length * CONFIG.hidden_size * CONFIG.num_layers


@runs_kernels
@pytest.mark.parametrize(
    "dtype, most, repeated",
    [(torch.float32, ALL, 3)] + [(torch.float16, most, 1 if HOPPER else 3) for most in (0, ALL)],
)
def test_every_product_is_counted_once(monkeypatch, dtype, most, repeated):
    """The formula's count, and the products that attention's backward pass repeats: the scores, or
    Version 3's three.
    """
    allow(monkeypatch, most, most)
    found, once = counted(dtype), flops.forward(CONFIG, BATCH, LENGTH, causal=False)["total"]
    assert found == {"forward": once, "backward": 2 * once + repeated * product(LENGTH)}
