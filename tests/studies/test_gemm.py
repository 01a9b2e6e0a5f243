"""The products that are timed are those that Version 1 runs, each shape once a round."""

import csv
from argparse import Namespace
from collections import Counter
from pathlib import Path

from common.config import ModelConfig
from studies import gemm
from tests import study_options
from tests.conftest import V1
from tracepage import files
from version1_pytorch_baseline import tiny_llama_v1 as v1

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPT = V1 / "analyze_gemm_operations.py"
CONFIGS = {
    "mha": ModelConfig(
        hidden_size=32, num_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=50
    ),
    "gqa": study_options.PEER.model_copy(update={"num_layers": 1, "intermediate_size": 40}),
}


class Products(TorchDispatchMode):
    """Counts the matrix products that run inside it, by (batch, M, N, K, layout)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            a, b = args
            layout = "".join("N" if operand.stride(-1) == 1 else "T" for operand in args)
            self.found[
                a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1], layout
            ] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [8, 7])
def test_the_products_are_those_of_a_training_step_of_version_1(name, length):
    config = CONFIGS[name]
    model, tokens = v1.TinyLlama(config), torch.randint(0, config.vocab_size, (2, length))
    with Products() as ran:
        model.loss(tokens, tokens).backward()
    expected = Counter()
    for product in gemm.products(config, 2, length):
        expected[product.shape] += product.per_step
    assert ran.found == expected


@pytest.mark.usefixtures("known_ceilings")
def test_the_script_measures_and_reports(execute, config, tmp_path):
    arguments = (
        "--model-config",
        config,
        "--batch-sizes",
        "2,2",
        "--sequence-lengths",
        "8",
        "--device",
        "cpu",
    )
    printed = execute(SCRIPT, *arguments, "--output-dir", "out")
    measured = files.read_json(tmp_path / "out/gemm_analysis.json")
    assert measured["device"]["kind"] == "cpu" and len(measured["gemms"]) == 30
    for row in measured["gemms"]:
        assert 0 < row["ms"]["p20"] <= row["ms"]["median"] <= row["ms"]["p80"]
        assert row["ms"]["count"] >= gemm.ROUNDS * gemm.MIN_SAMPLES
    rows = list(csv.DictReader((tmp_path / "out/gemm_analysis.csv").open()))
    assert len(rows) == 30 and all(row["ceiling_percent"] for row in rows)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gemm_analysis.csv",
        "gemm_analysis.json",
        "gemm_analysis.md",
        "gemm_analysis.png",
    ]
    assert "ceiling_percent" in printed.out and "out/gemm_analysis.png" in printed.out


def measured_on_the_cpu(
    path: Path, config: str, batch_sizes: list[int], lengths: list[int]
) -> dict:
    asked = dict(
        dtype="float32", allow_tf32=False, batch_sizes=batch_sizes, sequence_lengths=lengths
    )
    gemm.measure(CONFIGS[config], Namespace(**asked), torch.device("cpu"), path)
    return files.read_json(path)


@pytest.mark.usefixtures("known_ceilings")
def test_a_shape_is_timed_once_a_round_and_the_samples_are_shared(monkeypatch, tmp_path):
    timed = []

    def clock(product, precision):
        timed.append(product.shape)
        return [float(len(timed))]  # later is slower

    monkeypatch.setattr(gemm, "time_product", clock)
    measured = measured_on_the_cpu(tmp_path / "gemm_analysis.json", "mha", [1, 2], [4, 8])
    assert set(Counter(timed).values()) == {gemm.ROUNDS}
    by_name = {
        (row["batch_size"], row["sequence_length"], row["gemm"], row["phase"]): row
        for row in measured["gemms"]
    }
    assert by_name[1, 8, "q_proj", "forward"]["ms"] == by_name[2, 4, "o_proj", "forward"]["ms"], (
        "8 tokens, [32, 32]"
    )
    row = by_name[1, 4, "q_proj", "forward"]
    shapes = len(timed) // gemm.ROUNDS
    assert (row["ms"]["median"], row["ms"]["count"]) == (1 + shapes, gemm.ROUNDS)
