"""A saved model opens in transformers: the same configuration, tokenizer and logits."""

from pathlib import Path

from common import data
from common.config import ModelConfig
from common.training import checkpoint
from tests.oracle import assert_close
from version1_pytorch_baseline import tiny_llama_v1

import pytest


def test_checkpoint_opens_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "def area(r):\n    return 3.14 * r ** 2  # don't , ever . Gr\u00f6\u00dfe \u2211 \u6f22\n"
    (tmp_path / "text.py").write_text(text * 200, encoding="utf-8")
    dataset = data.load(str(tmp_path / "text.py"), 300, seed=0)
    config = ModelConfig(
        vocab_size=300, hidden_size=48, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        max_sequence_length=64, rope_theta=5000.0, rms_norm_eps=1e-4,
    )  # fmt: skip
    model, folder = tiny_llama_v1.TinyLlama(config), tmp_path / "saved"
    folder.mkdir()
    checkpoint.save(folder, model.baseline_state_dict(), config, dataset)

    opened, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    input_ids = tokenizer(text, return_tensors="pt").input_ids
    assert input_ids.flatten().tolist() == dataset.tokens[: input_ids.shape[1]].tolist()
    assert tokenizer.decode(input_ids[0]) == text
    assert_close(opened(input_ids).logits, model(input_ids))
