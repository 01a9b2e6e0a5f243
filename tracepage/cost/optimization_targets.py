"""The mean profiled step, and the most that each optimization of it could gain.

A target is a set of operators that a fused form would replace. Its floor is the least time of that
form under the measured ceilings, and its bound follows by Amdahl's law (`bottlenecks.ABOUT_TARGETS`
says how). The time of an operator is its self time: of its kernels on a GPU, of its own code on a
CPU.

Schema of optimization_targets.json, "tiny-llama-targets/1":

    profile, step_us    the file, and its mean profiled step (the attention in it, where only
                        attention was kept)
    targets             `Target`, the largest bound first
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tracepage.cost import operators
from tracepage.cost.operators import IdealCalls, OperatorCalls, least_seconds, linear_products
from tracepage.cost.peaks import datasheet
from tracepage.records.fields import Ceilings
from tracepage.records.step_profile import Profile

from typing_extensions import TypedDict

SCHEMA = "tiny-llama-targets/1"
# Attention's operators on [.., S, S]: where S = Dh, RoPE's have that shape too.
ON_SCORES = (
    "div",
    "triu",
    "fill_",
    "masked_fill",
    "masked_fill_",
    "_softmax",
    "_softmax_backward_data",
)
# The target of each change, which is a flag of some version.
CHANGES = {
    "qkv-fusion": "QKV fusion",
    "swiglu-fusion": "SwiGLU fusion",
    "flash-attention": "flash attention",
    "torch-compile": "elementwise fusion",
    "fused-adamw": "fused optimizer",
    "use-amp": "mixed precision",
}
FUSIONS = ("qkv-fusion", "swiglu-fusion", "flash-attention", "torch-compile")
# What every version has; other settings are a version's own switches.
COMMON_SETTINGS = {"capture_step", "checkpoint_activations"}


class Target(TypedDict):
    """An optimization of some operators; the last three are None where a ceiling is not known."""

    name: str
    fused_form: str
    operators: list[str]  # names
    calls: float  # in a step
    fused_calls: float
    time_us: float
    note: str
    floor_us: float | None
    share: float | None  # (time_us - floor_us) / step_us
    bound: float | None  # 1 / (1 - share)


@dataclass(frozen=True)
class Step:
    """The mean profiled step; times in us."""

    profile: Profile
    rows: list[OperatorCalls]  # largest time first
    us: float
    # time in which a GPU idles, or a CPU is outside all operators; 0 where only attention was kept
    outside_us: float

    @property
    def on_gpu(self) -> bool:
        return bool(self.profile["kernels"])

    def overhead(self, span: str) -> float:
        """us of overhead at each working call: an equal share of its span's overhead and of the
        time outside operators.
        """
        working = [row for row in self.rows if row.works]
        views = sum(row.us for row in self.rows if not row.works and row.span == span)
        calls_of_span = sum(row.calls for row in working if row.span == span)
        return views / calls_of_span + self.outside_us / sum(row.calls for row in working)


def mean_step(profile: Profile) -> Step:
    """The mean step of a profile."""
    rows = operators.rows(profile)
    inside = sum(row.us for row in rows)
    if profile["attention_only"]:
        return Step(profile, rows, inside, 0.0)
    wall = sum(profile["step_us"]) / profile["profiled_steps"]
    if profile["kernels"]:
        inside = profile["device_busy_us"] / profile["profiled_steps"]
    return Step(profile, rows, wall, max(0.0, wall - inside))


class Fusion(NamedTuple):
    """The operators that a fused form replaces, and its work."""

    name: str
    form: str
    rows: Sequence[OperatorCalls]
    work: Sequence[IdealCalls]
    part: Callable[[OperatorCalls], float] = lambda row: 1.0  # of a row's calls and time
    note: str = ""


def targets(step: Step) -> list[Target]:
    """Optimizations that concern operators in this profile, the largest bound first."""
    ceilings = step.profile["run"]["ceilings"]
    done = _fused(step.profile["run"].get("settings", {}))
    ranked = [
        _bounded(step, fusion, ceilings)
        for fusion in _fusions(step)
        if fusion.rows and fusion.name not in done
    ]
    ranked += _mixed_precision(step)
    return sorted(ranked, key=lambda target: -(target["bound"] or 0))


def _fused(settings: Mapping[str, Any]) -> set[str]:
    """The targets that a run has reached: their switches are on, or the version has other switches
    than these, because it always fuses.
    """
    switches = {change.replace("-", "_"): CHANGES[change] for change in FUSIONS}
    always = bool(settings.keys() - COMMON_SETTINGS)
    return {target for switch, target in switches.items() if settings.get(switch, always)}


def _working(step: Step) -> list[OperatorCalls]:
    return [row for row in step.rows if row.works and not operators.COMMUNICATION.search(row.name)]


def _bounded(step: Step, fusion: Fusion, ceilings: Ceilings | None) -> Target:
    """The time of the operators, and the least time of the fused form under the ceilings."""
    parts = [(row, fusion.part(row)) for row in fusion.rows]
    calls = sum(row.calls * part for row, part in parts)
    beside = sum(row.calls * part * step.overhead(row.span) for row, part in parts)
    now = sum(row.us * part for row, part in parts) + beside
    floor = share = bound = None
    if ceilings:
        fused = 0.0
        for work in fusion.work:
            us = 1e6 * least_seconds(work.flops, work.bytes, ceilings) + beside / calls
            fused += work.calls * max(us, 1e6 * ceilings["operation_seconds"])
        floor = min(now, fused)
        share = (now - floor) / step.us
        bound = 1 / (1 - share) if share < 1 else None
    return {
        "name": fusion.name,
        "fused_form": fusion.form,
        "operators": sorted({row.name for row in fusion.rows}),
        "calls": calls,
        "fused_calls": sum(work.calls for work in fusion.work),
        "time_us": now,
        "floor_us": floor,
        "share": share,
        "bound": bound,
        "note": fusion.note,
    }


def _fusions(step: Step) -> Iterator[Fusion]:
    """Letters as in common/config.py."""
    run = step.profile["run"]
    model = run["model"]
    training = run["training"]
    length = training["sequence_length"]
    tokens = training["batch_size"] * length
    hidden = model["hidden_size"]
    layers = model["num_layers"]
    ffn = model["intermediate_size"]
    head_dim = hidden // model["num_attention_heads"]
    kv = head_dim * model["num_key_value_heads"]
    element = operators.element_bytes(run)
    vector = element * tokens * hidden  # bytes of a [B, S, D]
    working = _working(step)

    def shapes(row: OperatorCalls) -> list[list[int]]:
        return [shape for shape in json.loads(row.shapes) if shape and isinstance(shape[0], int)]

    # The output projection has the shape of the Q projection.
    def qkv_part(row: OperatorCalls) -> float:
        (m, k), (_, n) = shapes(row)[:2]
        if sorted((m, k, n)) != sorted((tokens, hidden, hidden)):
            return 1.0
        return 3 / 4 if kv == hidden else 1 / 2

    # [.., S, S]; the copies of K and V for grouped queries have 5 dimensions
    def quadratic(row: OperatorCalls) -> bool:
        if row.name == "aten::bmm" or any(len(shape) == 5 for shape in shapes(row)):
            return True
        if length == head_dim and row.name.removeprefix("aten::") not in ON_SCORES:
            return False
        return any(shape[-2:] == [length, length] for shape in shapes(row))

    attention = [row for row in working if row.span == "attention" and row.name != "aten::mm"]
    projections = [row for row in working if row.span == "attention" and row.name == "aten::mm"]
    form = "Q, K and V by one GEMM of width D + 2 K Dh in each layer: one forward, two backward"
    work = linear_products(layers, tokens, hidden, hidden + 2 * kv, element)
    yield Fusion("QKV fusion", form, projections, work, qkv_part)

    form = (
        "gate and up by one GEMM of width 2 F; silu(gate) * up in one pass forward (2 reads, "
        "1 write), one backward (3, 2)"
    )
    work = [IdealCalls(layers, 0, element * tokens * ffn * passes) for passes in (3, 5)]
    work += linear_products(layers, tokens, hidden, 2 * ffn, element)
    mlp = [row for row in working if row.span == "mlp"]
    yield Fusion(
        "SwiGLU fusion", form, mlp, work, lambda row: 2 / 3 if row.name == "aten::mm" else 1.0
    )

    form = (
        "no [S, S] matrix in memory, no later positions; reads Q, K, V, writes O, and again "
        "for the gradients"
    )
    pairs = training["batch_size"] * length * (length + 1) // 2
    streams = element * tokens * 2 * (hidden + kv)  # Q, K, V and O
    work = [
        IdealCalls(layers, 4 * pairs * hidden, streams),
        IdealCalls(layers, 10 * pairs * hidden, 2 * streams),
    ]
    yield Fusion("flash attention", form, [row for row in attention if quadratic(row)], work)

    form = (
        "as torch.compile fuses: RoPE of Q and K one pass, each norm with its residual one "
        "pass, forward and backward"
    )
    rope = [row for row in attention if not quadratic(row)]
    norms = [row for row in working if row.span in ("norm", "residual")]
    work = [IdealCalls(2 * layers, 0, streams)] if rope else []
    # x -> y, and x, dy -> dx; the residual adds a read and a write, or a read, to all but the first
    # norm.
    if norms:
        passes = ((1, 2), (1, 3), (4 * layers, 4))
        work += [IdealCalls(calls, 0, number * vector) for calls, number in passes]
    yield Fusion("elementwise fusion", form, rope + norms, work)

    form = (
        "AdamW in one call: reads weight, gradient and both moments, writes weight and moments, "
        "all fp32"
    )
    optimizer = [row for row in working if row.span == "optimizer"]
    if any(row.name == "aten::_fused_adamw_" for row in optimizer):
        optimizer = []
    yield Fusion("fused optimizer", form, optimizer, [IdealCalls(1, 0, 7 * 4 * run["parameters"])])


def _mixed_precision(step: Step) -> list[Target]:
    """The products of a float32 step in bf16, under the data sheet's peak."""
    run = step.profile["run"]
    is_product = operators.MATRIX_PRODUCTS.__contains__
    products = [
        row for row in _working(step) if row.bytes and is_product(row.name.removeprefix("aten::"))
    ]
    if run["precision"]["compute"] != "fp32" or not products:
        return []
    device = run["device"]
    peaks = datasheet(device["name"], device.get("multiprocessors")) or {}
    bf16 = peaks.get("bf16")
    ceilings: Ceilings | None = None
    note = (
        "Not bounded: the bf16 ceiling of this device is not known; "
        "--use-amp --measure-peak measures it."
    )
    if bf16:
        note = f"With the data sheet's bf16 peak, {bf16 / 1e12:.0f} TFLOP/s."
        if run["ceilings"]:
            ceilings = {**run["ceilings"], "flops_per_second": bf16}
    work = [IdealCalls(row.calls, row.flops or 0, (row.bytes or 0) / 2) for row in products]
    form = "the same products in bf16: half the bytes, a higher peak"
    return [_bounded(step, Fusion("mixed precision", form, products, work, note=note), ceilings)]
