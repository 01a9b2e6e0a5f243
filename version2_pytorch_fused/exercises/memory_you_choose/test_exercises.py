"""Tests for the problems: of starter/, or with KERNEL_EXERCISES=solution of solution/.

Kept bytes and peaks are those of the CPU's allocator, in bf16 by autocast.
"""

import functools
import gc
import json
import operator
from collections.abc import Callable
from pathlib import Path

import exercise_tools as exercises
from common import recompute
from common.config import PRESETS, ModelConfig
from version2_pytorch_fused import tiny_llama_v2

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

memory = exercises.load(Path(__file__).parent, "memory")
IDS = torch.zeros(8, 128, dtype=torch.long)
KINDS = ("none", "block", "selective")


def config(layers: int = 2) -> ModelConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    }
    return ModelConfig(num_layers=layers, **sizes)


def build(layers: int = 2, kind: str = "none") -> tiny_llama_v2.TinyLlama:
    model = tiny_llama_v2.TinyLlama(config(layers))
    if kind == "yours":
        recompute.recompute(
            model, context_fn=functools.partial(create_selective_checkpoint_contexts, memory.policy)
        )
    elif kind != "none":
        recompute.apply(model, kind)
    return model


def loss(model: tiny_llama_v2.TinyLlama) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.loss(IDS, IDS)


def allocated(work: Callable[[], object], path: Path) -> tuple[int, int]:
    """Bytes that are left after it, and the most at once."""
    gc.collect()  # Otherwise garbage of earlier work may be freed while memory is counted.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    profiler.export_chrome_trace(str(path))
    del result
    now = 0
    most = 0
    events = json.loads(path.read_text())["traceEvents"]
    memory_events = [event for event in events if event["name"] == "[memory]"]
    for event in sorted(memory_events, key=operator.itemgetter("ts")):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return now, most


def kept_by_a_block(kind: str, path: Path) -> int:
    """The difference of two models, without the 16-bit weights that are kept if `kind` is none."""
    models = build(2, kind), build(3, kind)
    weights = sum(weight.numel() for weight in models[0].layers[0].parameters())
    casts = 2 * weights if kind == "none" else 0
    two, three = (allocated(functools.partial(loss, model), path)[0] for model in models)
    return three - two - casts


@pytest.mark.parametrize("kind", KINDS)
def test_problem1_kept(kind, tmp_path):
    predicted = memory.kept_bytes(config(), IDS.numel(), kind)
    assert predicted == pytest.approx(kept_by_a_block(kind, tmp_path / "trace.json"), rel=0.0025)


@pytest.mark.parametrize("kind", KINDS)
def test_problem2_peak(kind, tmp_path):
    model = build(8, kind)
    weights = sum(weight.numel() for weight in model.parameters())
    _, most = allocated(lambda: loss(model).backward(), tmp_path / "trace.json")
    assert memory.peak_bytes(config(8), *IDS.shape, kind) == pytest.approx(
        12 * weights + most, rel=0.03
    )


PREDICTED = {
    "none": (8618, 14702, 14861),
    "block": (3620, 4193, 4480),
    "selective": (5495, 8818, 9106),
}


@pytest.mark.parametrize("kind", KINDS)
def test_problem2_formula(kind):
    """MiB of `medium`; another moment is the peak of `block` in each shape."""
    model = ModelConfig(**PRESETS["medium"]["model"])
    peaks = [
        memory.peak_bytes(model, *shape, kind) / 2**20
        for shape in ((16, 512), (32, 512), (1, 16384))
    ]
    assert peaks == pytest.approx(PREDICTED[kind], rel=0.001)


def test_problem3_holders():
    events = [
        [0, 5, 0],
        [1, 7, 1],
        [0, -5, 0],
        [3, 6, 0],
        [1, -7, 1],
        [3, -6, 0],
        [6, 12, 1],
        [7, 2, 0],
        [7, -2, 0],
    ]
    held = memory.holders({"before_bytes": 100, "places": ["a", "b"], "events": events})
    assert held == {"before": 100, "a": 2, "b": 12}


def products(kind: str) -> int:
    """FLOPs of the matrix products of a forward and a backward pass."""
    model = build(kind=kind)
    with FlopCounterMode(display=False) as counter:
        loss(model).backward()
    return counter.get_flop_counts()["Global"][torch.ops.aten.mm]


def test_problem4_no_product_runs_again(tmp_path):
    assert products("yours") == products("none") < products("block"), (
        "policy: problem 4 of README.md: products run again"
    )
    yours, least = (
        kept_by_a_block(kind, tmp_path / "trace.json") for kind in ("yours", "selective")
    )
    assert yours == pytest.approx(least, rel=0.01)
