"""Configuration: the order of precedence, and one clear line for every value that is refused."""

import os
from collections.abc import Callable
from pathlib import Path

from common import config
from common.config import ModelConfig, TrainingConfig
from common.errors import UsageError

import pytest


@pytest.fixture
def yaml(tmp_path: Path):
    """yaml(text): path of a configuration file with that text."""

    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# -------------------------------------------------------------------------------------------------------- precedence


def test_flags_win_over_the_file_over_the_preset_over_defaults(yaml) -> None:
    file = yaml("model:\n  num_layers: 3\n  intermediate_size: 96\ntraining:\n  batch_size: 2\n")
    flags = dict(model=dict(intermediate_size=64, hidden_size=None), training=dict(seed=7, batch_size=None))
    resolved = config.resolve("small", file, **flags)
    assert resolved.model.intermediate_size == 64  # flag over file
    assert resolved.model.num_layers == 3  # file over preset
    assert resolved.model.hidden_size == 512  # preset over default; a flag that was not given changes nothing
    assert resolved.model.vocab_size == 1000  # default
    assert (resolved.training.batch_size, resolved.training.seed) == (2, 7)
    assert resolved.training.learning_rate == config.PRESETS["small"]["training"]["learning_rate"]


@pytest.mark.parametrize("preset", config.PRESETS)
def test_every_preset_is_valid(preset: str) -> None:
    resolved = config.resolve(preset)
    assert resolved.training.sequence_length <= resolved.model.max_sequence_length


def test_defaults_are_the_tiny_preset_and_large_is_the_shape_of_tinyllama_1b() -> None:
    assert config.resolve() == config.resolve("tiny") and config.resolve().model == ModelConfig()
    assert config.resolve().training == TrainingConfig()
    model = config.resolve("large").model
    assert (model.hidden_size, model.num_layers, model.num_attention_heads, model.num_key_value_heads) == (2048, 22, 32, 4)
    assert (model.intermediate_size, model.vocab_size, model.head_dim) == (5632, 32000, 64)


@pytest.mark.parametrize(("preset", "model", "training"), [
    ("small", (512, 8, 8, 4, 2048), (8, 128, 1e-3)), ("medium", (1024, 12, 8, 4, 4096), (16, 512, 3e-4)),
])  # fmt: skip
def test_shapes_and_rates_of_the_presets_between(preset, model, training) -> None:
    found = config.resolve(preset)
    names = "hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"
    assert tuple(getattr(found.model, name) for name in names) == model
    assert (found.training.batch_size, found.training.sequence_length, found.training.learning_rate) == training


def test_kv_heads_and_rotary_tables_follow_heads_and_sequence_length() -> None:
    assert config.resolve(model=dict(num_attention_heads=4)).model.num_key_value_heads == 4
    assert config.resolve(model=dict(num_attention_heads=4, num_key_value_heads=2)).model.num_key_value_heads == 2

    assert config.resolve(training=dict(sequence_length=16)).model.max_sequence_length == 128
    assert config.resolve(training=dict(sequence_length=500)).model.max_sequence_length == 500


RATES = {"1e-3": 1e-3, "1E+1": 10, "2.5e-3": 2.5e-3, ".5": 0.5, "5.": 5, "+0.1": 0.1, "1": 1, "'0.5'": 0.5}
STEPS = {"10": 10, "010": 10, "0o10": 8, "0x10": 16, "+10": 10, "!!int 010": 10}


@pytest.mark.parametrize(("key", "text", "value"), [
    *(("learning_rate", *rate) for rate in RATES.items()), *(("num_steps", *steps) for steps in STEPS.items()),
])  # fmt: skip
def test_numbers_of_a_file(yaml, key: str, text: str, value: float) -> None:
    """By YAML 1.1, 1e-3 is text and 010 is octal."""
    assert getattr(config.resolve(file=yaml(f"training:\n  {key}: {text}\n")).training, key) == value


def test_a_key_that_a_merge_brings_may_be_given_again(yaml) -> None:
    text = "model: &sizes {num_layers: 2, hidden_size: 64}\ntraining: {<<: {seed: 1, batch_size: 2}, seed: 3}\n"
    resolved = config.resolve(file=yaml(text))
    assert (resolved.training.seed, resolved.training.batch_size, resolved.model.num_layers) == (3, 2, 2)


# ------------------------------------------------------------------------------------------------------------ errors

BAD_FILES = {
    "text for a number": ("model: {num_layers: many}", r"model.num_layers = 'many': input should be a valid integer"),
    "half a layer": ("model: {num_layers: 1.5}", r"model.num_layers = 1.5: input should be a valid integer"),
    "a list for a number": ("training: {batch_size: [8]}", r"training.batch_size = \[8\]: input should be a valid integer"),
    "yes for a number": ("model: {num_layers: yes}", "model.num_layers = True: "),
    "infinite": ("training: {learning_rate: .inf}", "training.learning_rate = inf: "),
    "not a number": ("training: {learning_rate: .nan}", "training.learning_rate = nan: "),
    "null": ("training: {batch_size: null}", "training.batch_size = None: input should be a valid integer"),
    "minutes for a number": ("training: {num_steps: 1:30}", "training.num_steps = '1:30': input should be a valid integer"),
    "a date": ("training: {num_steps: 2024-01-31}", "training.num_steps = '2024-01-31': input should be a valid integer"),
    "too many digits": (f"training: {{num_steps: {'9' * 6000}}}", "config.yaml is not valid YAML: "),
    "a key twice": (
        "model: {num_layers: 2, hidden_size: 64, num_layers: 3}",
        "config.yaml is not valid YAML: num_layers is there twice in .*, line 1, column",
    ),
    "a section twice": (
        "model: {}\ntraining: {}\nmodel: {}",
        "config.yaml is not valid YAML: model is there twice in .*, line 3,",
    ),
    "a list": ("- 1\n- 2\n", "must hold the sections `model:` and `training:`"),
    "text": ("hello", "must hold the sections `model:` and `training:`"),
    "nothing": ("", "must hold the sections `model:` and `training:`"),
    "keys outside of a section": ("num_layers: 2", "must hold the sections `model:` and `training:`"),
    "an empty section": ("model:", "must hold the sections `model:` and `training:`"),
    "a tag that its value does not fit": ("model: {num_layers: !!bool 3}", "is not valid YAML: a value does not fit the tag"),
    "a tag without a value": ('model: {rope_theta: !!float ""}', "is not valid YAML: a value does not fit the tag"),
    "a tag of a date": ("model: {num_layers: !!timestamp x}", "is not valid YAML: a value does not fit the tag"),
    "syntax": ("model: {num_layers: 2", "is not valid YAML: .*line"),
    "a tab": ("model:\n\tnum_layers: 2", "is not valid YAML: .*line 2"),
    "longer than the file's tables": (
        "model: {max_sequence_length: 64}",
        "sequence length 128 is above the config's max_sequence_length 64: lower --seq-len or raise it there",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file(text: str, message: str, yaml) -> None:
    with pytest.raises(UsageError, match=message) as error:
        config.resolve(file=yaml(text))
    assert "\n" not in str(error.value)


SEVERAL = [
    (
        "model: {layers: 2, vocab_size: 0}\ntraining: {batch_size: -1}\n", {},
        ("unknown key model.layers", "model.vocab_size = 0", "training.batch_size = -1"),
    ),
    (
        "model: {hidden_dim: 64}\ntraining: {lr: 1}\noptimizer: {beta: 2}\n", {},
        (
            "config {}: unknown key model.hidden_dim (known: vocab_size, hidden_size, num_layers, ",
            "config {}: unknown key training.lr (known: batch_size, sequence_length, num_steps, learning_rate, seed)",
            "config {}: unknown key optimizer (known: model, training)",
        ),
    ),
    (
        "model: {num_layers: 0}\ntraining: {batch_size: 0}\n", {"batch_size": -1},
        ("config {}: model.num_layers = 0: ", "; training.batch_size = -1: "),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "flags", "messages"), SEVERAL, ids=["unknown and wrong", "unknown", "in the file and a flag"])
def test_all_mistakes_are_named_at_once_and_the_file_where_they_stand_there(yaml, text, flags, messages) -> None:
    file = yaml(text)
    with pytest.raises(UsageError) as error:
        config.resolve(file=file, training=flags)
    assert all(message.format(file) in str(error.value) for message in messages), error.value


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (str, "cannot read config .*missing: No such file or directory"),
    "binary": (lambda path: path.write_bytes(b"\x89PNG\r\n\xff\x00"), "binary is not valid YAML"),
    "pipe": (os.mkfifo, "--config .*pipe is a pipe that no process writes to"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    make, message = UNREADABLE[name]
    make(tmp_path / name)
    with pytest.raises(UsageError, match=message):
        config.resolve(file=tmp_path / name)


def test_sizes_have_an_upper_bound(yaml) -> None:
    assert config.resolve(training=dict(num_steps=10**9)).training.num_steps == 10**9
    for key in ("vocab_size", "hidden_size", "num_layers", "intermediate_size", "max_sequence_length"):
        with pytest.raises(UsageError, match=f"model.{key} = 1000000001: input should be less than or equal to 1000000000"):
            config.resolve(file=yaml(f"model: {{{key}: 1000000001}}"))


def test_a_file_that_may_not_be_read_names_the_flag(yaml, monkeypatch) -> None:
    def refuse(*_) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(config, "opened", refuse)
    with pytest.raises(UsageError, match="--config: cannot read config .*config.yaml: Permission denied"):
        config.resolve(file=yaml("model: {num_layers: 2}"))
