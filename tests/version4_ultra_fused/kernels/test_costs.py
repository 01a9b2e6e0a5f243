"""Bytes and FLOPs of each kernel by formula: against its tensors, by hand, and in FLOP counts."""

from argparse import Namespace
from collections import Counter

from common.analysis.formulas import flops
from common.config import ModelConfig
from common.training import flop_counters
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, interpreted

import pytest
import torch

pytest.importorskip("triton")
from version4_ultra_fused import kernels, tiny_llama_v4
from version4_ultra_fused.kernels import costs, elementwise, matmul, matmul_norm_backward, reference, short_attention
from version4_ultra_fused.memory import optimizer

# Sizes of tensors are multiples of 64, the alignment of the optimizer's buffers.
CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80
)
BATCH, LENGTH = 2, 17
# Tensors that the formulas leave out, and those that are read and written.
LEFT_OUT = {
    "weight", "rstd", "by_part", "dweight", "cos", "sin", "lse", "d", "targets", "losses", "mean", "dz", "ids", "order",
    "step", "dots", "parts",
}  # fmt: skip
IN_PLACE = {("_cross_entropy", "z"), ("_adamw", "w"), ("_adamw", "m"), ("_adamw", "v"), ("_swiglu_backward", "gate_up")}
# Kernels by what decides whether they run.
EVERYWHERE = {
    ("_rms_norm_forward", "forward"), ("_rms_norm_backward", "backward"), ("_rms_norm_dweight", "backward"),
    ("_flash_attention_forward", "forward"), ("_cross_entropy", "forward"), ("_cross_entropy_mean", "forward"),
    ("_embedding_backward", "backward"), ("_adamw", "optimizer"), ("_swiglu_backward", "backward"),
}  # fmt: skip
SEPARATE = {("_rotate", "forward"), ("_swiglu", "forward")}
EPILOGUES = {("_matmul", "forward")}
BOTH_NORMS = {("_matmul_norm_backward", "backward")}
THIRDS = {
    ("_flash_attention_backward_queries", "backward"), ("_flash_attention_backward_keys", "backward"), ("_rotate", "backward"),
}  # fmt: skip
SHORT = {("_short_attention_backward", "backward")}


ALL = 1 << 30  # the most elements of a product with an epilogue: any product has one
ONLY_QKV = BATCH * LENGTH * 64 * (4 + 2 * 2) * 16  # multiplications of q, k and v; gate and up have more


def allow(monkeypatch, most: int, multiplications: int) -> None:
    """Products of so many elements have an epilogue, and those of so many multiplications that of a norm's gradient."""
    for module in (matmul, elementwise, matmul_norm_backward, short_attention, costs):
        monkeypatch.setattr(module, "largest", lambda epilogue, depth=1: multiplications // depth if epilogue == "norm" else most)


def moved(kernel: str, tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of the tensors of a launch; views of one tensor count once."""
    tensors = {name: x for name, x in tensors.items() if name not in LEFT_OUT}
    if kernel == "_rotate" and tensors["q"].untyped_storage().data_ptr() == tensors["out"].untyped_storage().data_ptr():
        return 2 * sum(tensors[name].numel() * tensors[name].element_size() for name in "qk")
    twice = {x.data_ptr() for name, x in tensors.items() if (kernel, name) in IN_PLACE}
    if kernel == "_embedding_backward":
        tensors = {"dx": tensors["dx"]}
    sizes = {x.data_ptr(): x.numel() * x.element_size() for x in tensors.values()}
    return sum(size * (2 if place in twice else 1) for place, size in sizes.items())


def step(dtype: torch.dtype, enter=lambda phase: None) -> None:
    """Forward, backward and optimizer of a small model, as a training step takes them; `enter` is told each phase."""
    model = tiny_llama_v4.TinyLlama(CONFIG)
    optimizer = tiny_llama_v4.make_optimizer(model, Namespace(learning_rate=1e-3))
    optimizer.plan_memory(dtype)
    ids = torch.randint(61, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    enter("forward")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model.loss(*ids)
    enter("backward")
    loss.backward(model.one)
    enter("optimizer")
    optimizer.step()


@interpreted
@pytest.mark.parametrize("dtype, most, multiplications, expected", [
    (torch.float32, 0, 0, EVERYWHERE | SEPARATE | THIRDS), (torch.float16, 0, 0, EVERYWHERE | SEPARATE | SHORT),
    (torch.float16, ALL, ONLY_QKV, EVERYWHERE | EPILOGUES | BOTH_NORMS | SHORT),
    (torch.float16, ALL, ALL, EVERYWHERE | EPILOGUES | BOTH_NORMS | SHORT),
])  # fmt: skip
def test_bytes_by_formula_are_those_of_the_tensors_that_kernels_get(monkeypatch, dtype, most, multiplications, expected):
    from triton.runtime.interpreter import InterpretedFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    allow(monkeypatch, most, multiplications)
    given: Counter = Counter()
    launches: Counter = Counter()
    phases = []

    def note(self, *arguments, grid, warmup, **constants):
        named = dict(zip((name.removesuffix("_ptr") for name in self.arg_names), arguments, strict=False))
        named = {name: x.base if isinstance(x, TensorDescriptor) else x for name, x in named.items()}
        tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        given[self.fn.__name__, phases[-1]] += moved(self.fn.__name__, tensors)
        launches[self.fn.__name__, phases[-1]] += 1
        return original(self, *arguments, grid=grid, warmup=warmup, **constants)

    original = InterpretedFunction.run
    monkeypatch.setattr(InterpretedFunction, "run", note)
    step(dtype, phases.append)
    found = costs.training_step(CONFIG, BATCH, LENGTH, dtype.itemsize, launches)
    assert given.keys() == expected <= found.keys()
    assert {key: found[key].bytes or 0 for key in expected} == given


def test_flops_and_early_updates_by_hand():
    """At e = 2, FLOPs of the pairs that are not masked, for a step with all epilogues; the test above has the other bytes."""
    tokens, layers, d, f, v, c = 8 * 128, 4, 256, 512, 1000, (8 + 2 * 4) * 32
    pairs = 2 * d * 8 * 128 * 129 // 2 * layers
    launched = dict.fromkeys(EVERYWHERE | EPILOGUES | BOTH_NORMS | SHORT | {("_adamw", "backward")}, 1)
    launched["_matmul_norm_backward", "backward"] = 2 * layers
    found = costs.training_step(ModelConfig(num_key_value_heads=4), 8, 128, 2, launched)
    assert {key: found[key].flops for key in launched if found[key].flops is not None} == {
        ("_matmul", "forward"): layers * 2 * tokens * d * (c + 2 * f),
        ("_matmul_norm_backward", "backward"): layers * 2 * tokens * d * (c + 2 * f),
        ("_flash_attention_forward", "forward"): 2 * pairs, ("_short_attention_backward", "backward"): 5 * pairs,
    }  # fmt: skip
    assert found["_adamw", "backward"].bytes == 28 * layers * d * (c + d + 3 * f)
    assert found["_adamw", "optimizer"].bytes == 30 * d * (v + 2 * layers + 1)


def test_bytes_of_fp8_are_those_of_the_tensors(no_kernels, monkeypatch):
    """PyTorch's operations stand in for the kernels, which store the same numbers."""
    given, phase = Counter(), ["forward"]

    def noting(kernel: str, operation):
        def note(*arguments):
            results = operation(*arguments)
            given[kernel, phase[-1]] += sum(x.numel() * x.element_size() for x in (*arguments[:-1], *results))
            return results

        return note

    for name in ("quantize", "swiglu_quantized", "swiglu_backward_quantized"):
        kernel = f"_{name.replace('_backward', '')}"
        monkeypatch.setattr(kernels, name, noting(kernel, getattr(reference, name)))
    model = tiny_llama_v4.TinyLlama(CONFIG, tiny_llama_v4.SWITCHES | {"fp8": True})
    optimizer.MasterAdamW(model, lr=1e-3, fp8=True).plan_memory(torch.bfloat16)
    ids = torch.randint(61, (2, BATCH, LENGTH - 1), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(*ids)
    phase.append("backward")
    loss.backward(model.one)
    found = costs.training_step(CONFIG, BATCH, LENGTH - 1, 2, given)
    assert len(given) == 4 and {key: found[key].bytes for key in given} == given


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
