"""Decoding with a cache gives what the model gives without one; and what generate.py refuses,
prints and records.
"""

from pathlib import Path

from common import cli
from common.options import Options
from tests.conftest import ROOT, runs_kernels
from tests.oracle import DEVICE
from tracepage import files
from tracepage.records.study_files import Decoding

import pytest
import torch

pytest.importorskip("triton")
from decoding import decode_kernels, generate  # noqa: F401  (the first while kernels are interpreted)
from version1_pytorch_baseline import tiny_llama_v1

SCRIPT = ROOT / "decoding/generate.py"
SIZES = (
    "model: {vocab_size: 300, hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,\n"
    "  intermediate_size: 48, max_sequence_length: 24}\ntraining: {sequence_length: 24}\n"
)
PROMPT = torch.tensor([3, 1, 41, 5, 9])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SIZES)
    return tmp_path / "small.yaml"


def decoder(operations: str, dtype: torch.dtype, config: Path) -> generate.Decoder:
    flags = ["--prompt-tokens", "1", "--config", str(config)]
    return generate.Decoder(
        operations, cli.resolve(Options, cli.parse(generate.parser(), flags)), 24, dtype
    )


def logits_of(made: generate.Decoder, steps: int) -> torch.Tensor:
    """The logits from which each token was chosen, [steps + 1, V]."""
    rows, choose = [], made.choose
    made.choose = lambda row: choose(rows.append(row) or row)
    made.prefill(PROMPT.to(DEVICE))
    for _ in range(steps):
        made.step()
    return torch.stack(rows)


@runs_kernels
@pytest.mark.parametrize(
    "operations, dtype",
    [
        ("v1", torch.float64),
        ("v2", torch.float64),
        ("v3", torch.float64),
        ("v3", torch.float32),
        ("fused", torch.float32),
    ],
)
def test_a_cache_changes_neither_logits_nor_tokens(operations, dtype, config):
    """Against Version 1's whole forward pass over the text that was written."""
    made = decoder(operations, dtype, config)
    got, text = logits_of(made, 18), made.ids[:24]
    whole = tiny_llama_v1.TinyLlama(generate.ModelConfig(**made.config.model_dump())).to(
        DEVICE, dtype
    )
    whole.load_state_dict(made.model.baseline_state_dict())
    expected = whole(text[None, :-1])[0, 4:]
    torch.testing.assert_close(
        got, expected, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4})
    )
    assert text.tolist() == [*PROMPT.tolist(), *expected.argmax(dim=-1).tolist()]


@pytest.mark.gpu
@pytest.mark.parametrize("operations", [*generate.VERSIONS, "fused"])
def test_a_captured_step_writes_the_eager_text(operations, config):
    texts = []
    for capture in (False, True):
        torch.manual_seed(0)
        made = decoder(operations, torch.bfloat16, config)
        made.temperature = 1.0
        generate.measure(made, PROMPT.to(DEVICE), 19, capture, seed=0)
        texts.append(made.ids[:24].tolist())
    assert texts[0] == texts[1] and texts[0][:5] == PROMPT.tolist()


def test_a_temperature_draws_as_the_model_says(config):
    made, logits = (
        decoder("v1", torch.float32, config),
        torch.tensor([0.0, 1.0, 2.0], device=DEVICE),
    )
    assert made.choose(logits) == 2
    made.temperature = 0.5
    drawn = torch.cat([made.choose(logits) for _ in range(4000)]).bincount(minlength=3) / 4000
    torch.testing.assert_close(drawn, (logits / 0.5).softmax(0), rtol=0, atol=0.03)


def test_a_checkpoint_writes_text_and_a_record(execute, config, tmp_path):
    """All operations write the same text from it."""
    (tmp_path / "text").write_text("def twice(x):\n    return 2 * x\n" * 50)
    train = (
        "--config",
        config,
        "--batch-size",
        "2",
        "--seq-len",
        "24",
        "--num-steps",
        "30",
        "--data",
        "text",
    )
    execute(
        ROOT / "version2_pytorch_fused/tiny_llama_v2.py",
        *train,
        "--warmup-steps",
        "1",
        "--save-model",
        "model",
    )
    texts = set()
    for name in generate.VERSIONS:
        write = (
            "--checkpoint",
            "model",
            "--prompt",
            "def tw",
            "--tokens",
            "6",
            "--metrics-out",
            "out.json",
        )
        texts.add(execute(SCRIPT, *write, "--operations", name).out.partition("\n\nprefill")[0])
    [text] = texts
    assert text.startswith("def tw") and len(text) > 8
    measured = files.read(tmp_path / "out.json", Decoding)
    assert (measured["operations"], measured["mode"], measured["tokens"]) == ("v3", "eager", 6)
    assert measured["token_ms"]["count"] == 5
    weights = sum(
        weight.numel()
        for weight in tiny_llama_v1.TinyLlama(
            generate.ModelConfig(**measured["model"])
        ).parameters()
    )
    assert measured["weight_bytes"] == 4 * weights


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--tokens", "20"],
            "a prompt of 5, --tokens 20: give at least 1 and 4, at most 24 in all",
        ),
        (["--tokens", "3"], "--tokens 3: give"),
        (["--capture-step"], "--capture-step needs a GPU"),
    ],
)
def test_what_cannot_be_is_refused(refused, config, flags, message):
    assert message in refused(
        SCRIPT, "--prompt-tokens", "5", "--config", config, "--tokens", "4", *flags
    )


def test_a_folder_without_a_model_is_refused(refused, tmp_path):
    assert "cannot read empty/config.json" in refused(SCRIPT, "--checkpoint", "empty")
    (tmp_path / "config.json").write_text("{}")
    assert ". holds no model that --save-model has written" in refused(SCRIPT, "--checkpoint", ".")
