"""Configuration: what overrides what, and one clear line for everything that cannot be."""

from pathlib import Path

from common import cli, config
from common.config import ModelConfig, TrainingConfig
from common.errors import UsageError
from common.training import version_files

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


def test_defaults_are_the_tiny_preset() -> None:
    resolved = config.resolve()
    assert resolved.model == ModelConfig() and resolved.training == TrainingConfig()


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


def test_large_is_the_shape_of_tinyllama_1b() -> None:
    model = config.resolve("large").model
    assert (model.hidden_size, model.num_layers, model.num_attention_heads, model.num_key_value_heads) == (2048, 22, 32, 4)
    assert (model.intermediate_size, model.vocab_size, model.head_dim) == (5632, 32000, 64)


def test_kv_heads_follow_the_heads_unless_given() -> None:
    assert config.resolve(model=dict(num_attention_heads=4)).model.num_key_value_heads == 4
    assert config.resolve(model=dict(num_attention_heads=4, num_key_value_heads=2)).model.num_key_value_heads == 2


def test_rotary_tables_grow_with_the_sequence_length() -> None:
    assert config.resolve(training=dict(sequence_length=16)).model.max_sequence_length == 128
    assert config.resolve(training=dict(sequence_length=500)).model.max_sequence_length == 500


def test_exponent_without_a_point_is_a_number(yaml) -> None:
    """PyYAML reads 1e-3 as text."""
    assert config.resolve(file=yaml("training:\n  learning_rate: 1e-3\n")).training.learning_rate == 0.001


def test_either_section_may_be_missing(yaml) -> None:
    assert config.resolve(file=yaml("model: {num_layers: 1}\n")).model.num_layers == 1
    assert config.resolve(file=yaml("training: {seed: 1}\n")).training.seed == 1


# ------------------------------------------------------------------------------------------------------------ errors

BAD_FILES = {
    "unknown key": ("model: {hidden_dim: 64}", "unknown key model.hidden_dim"),
    "unknown section": ("optimizer: {lr: 1}", "unknown key optimizer"),
    "several at once": ("model: {a: 1, num_layers: 0}", "unknown key model.a"),
    "text for a number": ("model: {num_layers: many}", r"model.num_layers = 'many': input should be a valid integer"),
    "half a layer": ("model: {num_layers: 1.5}", r"model.num_layers = 1.5: input should be a valid integer"),
    "a list for a number": ("training: {batch_size: [8]}", r"training.batch_size = \[8\]: input should be a valid integer"),
    "yes for a number": ("model: {num_layers: yes}", "model.num_layers = True: "),
    "infinite": ("training: {learning_rate: .inf}", "training.learning_rate = inf: "),
    "not a number": ("training: {learning_rate: .nan}", "training.learning_rate = nan: "),
    "null": ("training: {batch_size: null}", "training.batch_size = None: input should be a valid integer"),
    "a list": ("- 1\n- 2\n", "must hold the sections `model:` and `training:`"),
    "text": ("hello", "must hold the sections `model:` and `training:`"),
    "nothing": ("", "must hold the sections `model:` and `training:`"),
    "keys outside of a section": ("num_layers: 2", "must hold the sections `model:` and `training:`"),
    "an empty section": ("model:", "must hold the sections `model:` and `training:`"),
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


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read config .*nowhere.yaml: No such file or directory"):
        config.resolve(file=tmp_path / "nowhere.yaml")


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_bytes(b"\x89PNG\r\n\xff\x00")
    with pytest.raises(UsageError, match="model.yaml is not valid YAML"):
        config.resolve(file=tmp_path / "model.yaml")


def test_all_mistakes_are_named_at_once(yaml) -> None:
    with pytest.raises(UsageError) as error:
        config.resolve(file=yaml("model: {layers: 2, vocab_size: 0}\ntraining: {batch_size: -1}\n"))
    for key in ("model.layers", "model.vocab_size = 0", "training.batch_size = -1"):
        assert key in str(error.value)


BAD_FLAGS = {
    "heads do not divide": (["--num-heads", "7"], "hidden_size 256 is not divisible by num_attention_heads 7"),
    "kv heads do not divide": (["--num-kv-heads", "3"], "num_attention_heads 8 is not divisible by num_key_value_heads 3"),
    "more kv heads than heads": (["--num-kv-heads", "16"], "num_attention_heads 8 is not divisible by num_key_value_heads 16"),
    "odd head dimension": (["--hidden-dim", "24"], "head dimension 24 / 8 = 3 is odd"),
    "zero layers": (["--num-layers", "0"], "model.num_layers = 0: input should be greater than 0"),
    "zero heads": (["--num-heads", "0"], "model.num_attention_heads = 0: input should be greater than 0"),
    "zero kv heads": (["--num-kv-heads", "0"], "model.num_key_value_heads = 0: input should be greater than 0"),
    "negative width": (["--hidden-dim", "-256"], "model.hidden_size = -256: input should be greater than 0"),
    "negative ffn": (["--intermediate-dim", "-1"], "model.intermediate_size = -1: input should be greater than 0"),
    "no vocabulary": (["--vocab-size", "0"], "model.vocab_size = 0: input should be greater than 0"),
    "no batch": (["--batch-size", "0"], "training.batch_size = 0: input should be greater than 0"),
    "no sequence": (["--seq-len", "0"], "training.sequence_length = 0: input should be greater than or equal to 2"),
    "no steps": (["--num-steps", "-3"], "training.num_steps = -3: input should be greater than 0"),
    "no learning": (["--learning-rate", "0"], "training.learning_rate = 0.0: input should be greater than 0"),
    "negative seed": (["--seed", "-1"], "training.seed = -1: input should be greater than or equal to 0"),
    "not a number": (["--batch-size", "big"], "--batch-size: invalid int value: 'big'"),
    "unknown preset": (["--preset", "huge"], "--preset: invalid choice: 'huge'"),
    "unknown sort key": (["--sort-by", "speed"], "--sort-by: invalid choice: 'speed'"),
    "unknown flag": (["--batchsize", "8"], "unrecognized arguments: --batchsize 8"),
    "abbreviated flag": (["--batch", "8"], "unrecognized arguments: --batch 8"),
    "missing file": (["--config", "nowhere.yaml"], "cannot read config nowhere.yaml"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_bad_flags_end_in_one_line_and_exit_code_2(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        arguments = cli.parser(None).parse_args(flags)
        cli.command(lambda: cli.parse(arguments) and None)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert message in printed.err


def test_flags_reach_the_configuration() -> None:
    flags = "--preset small --hidden-dim 64 --num-heads 4 --num-kv-heads 2 --num-layers 1 --intermediate-dim 96 --vocab-size 300"
    training = "--batch-size 2 --seq-len 32 --num-steps 5 --learning-rate 1e-2 --seed 9"
    parsed = cli.parse(cli.parser(None).parse_args(f"{flags} {training}".split()))
    model = parsed.model
    assert (model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.num_layers) == (64, 4, 2, 1)
    assert (model.intermediate_size, model.vocab_size) == (96, 300)
    assert (parsed.batch_size, parsed.seq_len, parsed.num_steps, parsed.learning_rate, parsed.seed) == (2, 32, 5, 0.01, 9)


def test_a_comparison_reads_its_flags_as_a_run_does() -> None:
    flags = "--preset small --batch-size 2 --seq-len 32 --seed 9 --device cpu --use-amp --amp-dtype float16"
    of_a_run = vars(cli.parse(cli.parser(None).parse_args(flags.split())))
    of_a_comparison = vars(version_files.resolve(version_files.parser(None).parse_args(flags.split())))
    assert of_a_comparison["seq_len"] == 32 and of_a_comparison.items() <= of_a_run.items()


@pytest.mark.parametrize(("left_out", "flag"), [("batch_size", "--batch-size"), ("sequence_length", "--seq-len")])
def test_a_comparison_without_a_flag_takes_the_preset(left_out: str, flag: str, capsys: pytest.CaptureFixture) -> None:
    parser = version_files.parser(None, **{left_out: False})
    options = version_files.resolve(parser.parse_args(["--preset", "medium"]))
    assert (options.batch_size, options.seq_len) == (16, 512)
    with pytest.raises(SystemExit):
        parser.parse_args([flag, "4"])
    assert f"unrecognized arguments: {flag} 4" in capsys.readouterr().err
