"""What the kernels are timed with: an operation's inputs and work at a shape, and contenders that
take turns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import device as devices
from common.config import ModelConfig
from common.precision import Precision
from common.rope import rope_tables
from common.timing import benchmark
from tracepage.views.kernel_benchmark import BYTES, FLOPS

import torch
from torch import Tensor

ROUNDS = 3
ITERATIONS = 10
REPLAY_MS = 1.0
MOST_PASSES = 100
Shape = tuple[ModelConfig, int, int]  # model, B, S


@dataclass(frozen=True)
class Case:
    """An operation at a shape: its tensors with gradients, other arguments, and what it moves or
    computes at least.
    """

    operation: str
    inputs: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    unit: str
    amount: int

    def step(self, function: Callable, separate: bool = False) -> Callable[[], object]:
        """A forward and backward pass, for gradients that are made here; `separate` inputs are no
        parts of a fused product.
        """
        inputs = [separated(x) for x in self.inputs] if separate else self.inputs
        outputs = function(*inputs, *self.rest)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn_like(output) for output in outputs]
        return lambda: torch.autograd.grad(function(*inputs, *self.rest), inputs, gradients)


def separated(x: Tensor) -> Tensor:
    """The same numbers as a product of their own gives them: [..., D], or [B, S, heads, Dh] seen as
    [B, heads, S, Dh].
    """
    rows = x.detach() if x.dim() < 4 else x.detach().transpose(1, 2)
    copy = rows.clone(memory_format=torch.contiguous_format)  # Liger writes into some of its inputs
    return (copy if x.dim() < 4 else copy.transpose(1, 2)).requires_grad_()


def case(operation: str, shape: Shape, precision: Precision) -> Case:
    """The operation's inputs and work at a shape; sizes as in `common.config`."""
    config, batch, length = shape
    device = precision.device
    dtype = precision.dtype
    size = dtype.itemsize
    hidden = config.hidden_size
    ffn = config.intermediate_size
    vocabulary = config.vocab_size
    tokens = batch * length
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    head_dim = config.head_dim

    def tensor(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype).requires_grad_()

    def parts(*widths: int) -> tuple[Tensor, ...]:
        """Of one [B, S, sum of the widths], as a fused product leaves them."""
        whole = torch.randn(batch, length, sum(widths), device=device, dtype=dtype)
        return tuple(part.requires_grad_() for part in whole.split(widths, dim=-1))

    def by_head(part: Tensor) -> Tensor:  # [B, S, heads Dh] -> [B, heads, S, Dh]
        return part.detach().unflatten(-1, (-1, head_dim)).transpose(1, 2).requires_grad_()

    if operation in ("rms_norm", "add_rms_norm"):
        addends, numbers = (1, 5) if operation == "rms_norm" else (2, 8)
        inputs = *(tensor(batch, length, hidden) for _ in range(addends)), tensor(hidden)
        moved = numbers * tokens * hidden * size
        return Case(operation, inputs, (config.rms_norm_eps,), BYTES, moved)
    if operation == "swiglu":
        return Case(operation, parts(ffn, ffn), (), BYTES, 8 * tokens * ffn * size)
    if operation == "linear_cross_entropy":
        targets = torch.randint(vocabulary, (batch, length), device=device)
        inputs = tensor(batch, length, hidden), tensor(vocabulary, hidden)
        return Case(operation, inputs, (targets,), FLOPS, 3 * 2 * tokens * hidden * vocabulary)
    q, k, v = (by_head(part) for part in parts(hidden, kv_heads * head_dim, kv_heads * head_dim))
    if operation == "apply_rope":
        cos, sin = rope_tables(head_dim, length, config.rope_theta)
        tables = (cos.to(device), sin.to(device))
        moved = 4 * tokens * head_dim * (heads + kv_heads) * size
        return Case(operation, (q, k), tables, BYTES, moved)
    product = 2 * hidden * batch * length * (length + 1) // 2
    return Case(operation, (q, k, v), (), FLOPS, 7 * product)


def in_turns(steps: dict[str, Callable], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each call by name, the contenders one after the other in each of ROUNDS
    rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name] += benchmark(step, device, warmup=3, iterations=ITERATIONS)
    return times


def replayed(steps: dict[str, Callable], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of a pass by name, as GPU work alone: each replay's over its passes, of which
    all contenders have as many.
    """
    quickest = min(
        min(benchmark(devices.capture_graph(step), device, warmup=1, iterations=3))
        for step in steps.values()
    )
    passes = min(MOST_PASSES, math.ceil(REPLAY_MS / quickest))
    graphs = {name: devices.capture_graph(step, passes) for name, step in steps.items()}
    times = in_turns(graphs, device)
    for values in times.values():
        values[:] = [ms / passes for ms in values]
    return times
