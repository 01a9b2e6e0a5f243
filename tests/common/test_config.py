"""Configuration: the order of precedence, and one clear line for a value that is refused."""

from pathlib import Path

from common import config
from common.config import ModelConfig, TrainingConfig
from tracepage.errors import UsageError

import pytest


@pytest.fixture
def yaml(tmp_path: Path):
    """yaml(text): path of a configuration file with that text."""

    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_flags_win_over_the_file_over_the_preset_over_defaults(yaml) -> None:
    file = yaml(
        "model:\n  num_layers: 3\n  intermediate_size: 96\ntraining:\n  batch_size: 2\n  learning_rate: 1e-3\n"
    )
    flags = dict(
        model=dict(intermediate_size=64, hidden_size=None), training=dict(seed=7, batch_size=None)
    )
    resolved = config.resolve("medium", file, **flags)
    assert resolved.model.intermediate_size == 64  # flag over file
    assert resolved.model.num_layers == 3  # file over preset
    # preset over default; a flag that was not given changes nothing
    assert resolved.model.hidden_size == 1024
    assert resolved.model.vocab_size == 1000  # default
    assert (
        resolved.training.batch_size,
        resolved.training.seed,
        resolved.training.learning_rate,
    ) == (2, 7, 1e-3)


SHAPES = {  # D, L, H, K, F, V; B, S, learning rate
    "tiny": (256, 4, 8, 8, 512, 1000, 8, 128, 1.5e-3),
    "small": (512, 8, 8, 4, 2048, 1000, 8, 128, 1e-3),
    "medium": (1024, 12, 8, 4, 4096, 1000, 16, 512, 3e-4),
    "large": (2048, 22, 32, 4, 5632, 32000, 4, 2048, 3e-4),  # TinyLlama-1.1B
}


@pytest.mark.parametrize("preset", config.PRESETS)
def test_presets(preset: str) -> None:
    model, training = config.resolve(preset).model, config.resolve(preset).training
    sizes = (
        model.hidden_size,
        model.num_layers,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.intermediate_size,
    )
    assert (
        *sizes,
        model.vocab_size,
        training.batch_size,
        training.sequence_length,
        training.learning_rate,
    ) == SHAPES[preset]
    assert training.sequence_length <= model.max_sequence_length


def test_the_written_out_configuration_is_the_default() -> None:
    file = Path(__file__).parents[2] / "version1_pytorch_baseline/tiny_llama_v1_config.yaml"
    assert (
        config.resolve(file=file)
        == config.resolve()
        == config.Config(model=ModelConfig(), training=TrainingConfig())
    )


def test_a_key_that_replaces_a_merged_one_is_given_once(yaml) -> None:
    file = yaml("sizes: &sizes {hidden_size: 64, seed: 2}\nmodel: {<<: *sizes, seed: 3}")
    assert config.read_yaml(file)["model"] == {"hidden_size": 64, "seed": 3}


def test_kv_heads_and_rotary_tables_follow_heads_and_sequence_length() -> None:
    assert config.resolve(model=dict(num_attention_heads=4)).model.num_key_value_heads == 4
    assert (
        config.resolve(
            model=dict(num_attention_heads=4, num_key_value_heads=2)
        ).model.num_key_value_heads
        == 2
    )
    assert config.resolve(training=dict(sequence_length=16)).model.max_sequence_length == 128
    assert config.resolve(training=dict(sequence_length=500)).model.max_sequence_length == 500


BAD_FILES = {
    "text for a number": (
        "model: {num_layers: many}",
        "model.num_layers = 'many': input should be a valid integer",
    ),
    "yes for a number": (
        "model: {num_layers: yes}",
        "model.num_layers = True: input should be a valid integer",
    ),
    "not a number": ("training: {learning_rate: .nan}", "training.learning_rate = nan: "),
    "an unknown key": (
        "model: {layers: 2}",
        r"config.yaml: unknown key model.layers \(known: vocab_size, ",
    ),
    "an unknown section": ("optimizer: {}", r"unknown key optimizer \(known: model, training\)"),
    "no sections": ("num_layers: 2", "must hold the sections `model:` and `training:`"),
    "syntax": ("model: {num_layers: 2", "is not valid YAML: .*line"),
    "a key given twice": (
        "model:\n  hidden_size: 64\n  num_layers: 2\n  'hidden_size': 32",
        "is not valid YAML: line 4 gives hidden_size a second time",
    ),
    "a key given twice in a line": (
        "model: {num_layers: 2, num_layers: 3}",
        "line 1 gives num_layers",
    ),
    "a section given twice": (
        "model: {hidden_size: 64}\ntraining: {}\nmodel: {num_layers: 2}",
        "line 3 gives model a second time",
    ),
    "nested too deep": ("model: " + "[" * 3000, "is not valid YAML"),
    "nested too deep and closed": ("model: " + "{a: " * 3000 + "}" * 3000, "is not valid YAML"),
    "longer than the file's tables": (
        "model: {max_sequence_length: 64}",
        "sequence length 128 is above .* 64: lower --seq-len",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_one_line(text: str, message: str, yaml) -> None:
    with pytest.raises(UsageError, match=message) as error:
        config.resolve(file=yaml(text))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read .*missing.yaml: No such file or directory"):
        config.resolve(file=tmp_path / "missing.yaml")
