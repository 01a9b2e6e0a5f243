"""The shared command line: flags, switches, and how a command ends."""

import argparse
import io
import sys
from dataclasses import FrozenInstanceError

from common import cli, signals
from common.errors import RunError, UsageError

import pytest

SWITCHES = {"qkv-fusion": True, "flash-attention": True, "torch-compile": False}


def parsed(*flags: str):
    return cli.parse(cli.parser(None).parse_args(flags))


NOT_POSITIVE = {
    "--num-layers": "model.num_layers", "--num-heads": "model.num_attention_heads", "--vocab-size": "model.vocab_size",
    "--num-kv-heads": "model.num_key_value_heads", "--hidden-dim": "model.hidden_size", "--batch-size": "training.batch_size",
    "--intermediate-dim": "model.intermediate_size", "--num-steps": "training.num_steps", "--seq-len": "training.sequence_length",
    "--learning-rate": "training.learning_rate",
}  # fmt: skip
HUGE = "--batch-size", "--vocab-size", "--num-steps", "--seq-len"
BAD_FLAGS = {
    "--num-heads 7": "hidden_size 256 is not divisible by num_attention_heads 7",
    "--num-kv-heads 3": "num_attention_heads 8 is not divisible by num_key_value_heads 3",
    "--num-kv-heads 16": "num_attention_heads 8 is not divisible by num_key_value_heads 16",
    "--hidden-dim 24": "head dimension 24 / 8 = 3 is odd",
    **{f"{flag} {value}": f"{key} = {value}" for flag, key in NOT_POSITIVE.items() for value in (0, -256)},
    **{f"{flag} 99999999999999999999": f"{NOT_POSITIVE[flag]} = 99999999999999999999: input should be less" for flag in HUGE},
    "--warmup-steps 99999999999999999999": "--warmup-steps: '99999999999999999999' is above 1,000,000,000",
    f"--batch-size {'9' * 10_000}": "invalid int value: '999",
    f"--warmup-steps {'9' * 10_000}": "--warmup-steps: '999",
    "--seed -1": "training.seed = -1: input should be greater than or equal to 0",
    "--batch-size big": "--batch-size: invalid int value: 'big'",
    "--preset huge": "--preset: invalid choice: 'huge'",
    "--sort-by speed": "--sort-by: invalid choice: 'speed'",
    "--batchsize 8": "unrecognized arguments: --batchsize 8",
    "--batch 8": "unrecognized arguments: --batch 8",
    "--config nowhere.yaml": "cannot read config nowhere.yaml",
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.items(), ids=[flags[:30] for flags in BAD_FLAGS])
def test_bad_flags_end_in_one_line_and_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.command(lambda: cli.parse(cli.parser(None).parse_args(flags.split())) and None)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert message in printed.err and len(printed.err) < 400


def test_numbers_of_flags():
    assert [cli.positive(text) for text in ("1", "0007", "1000000000")] == [1, 7, 10**9]
    assert cli.positive_list("1, 2,3") == [1, 2, 3]
    assert [cli.amount(text) for text in ("0", "1e-3", "2.5")] == [0, 1e-3, 2.5]
    for text in ("0", "00", "", "-1", "1.5", "\u0661", "1000000001", "9" * 10_000):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.positive(text)
    for text in ("nan", "-nan", "inf", "-1", "-1e-9", "fast", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not a number from 0 on"):
            cli.amount(text)


def test_flags_reach_the_configuration():
    flags = "--preset small --hidden-dim 64 --num-heads 4 --num-kv-heads 2 --num-layers 1 --intermediate-dim 96 --vocab-size 300"
    training = "--batch-size 2 --seq-len 32 --num-steps 5 --learning-rate 1e-2 --seed 9"
    options = parsed(*flags.split(), *training.split())
    model = options.model
    assert (model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.num_layers) == (64, 4, 2, 1)
    assert (model.intermediate_size, model.vocab_size) == (96, 300)
    assert (options.batch_size, options.seq_len, options.num_steps, options.learning_rate, options.seed) == (2, 32, 5, 0.01, 9)
    with pytest.raises(FrozenInstanceError):
        options.seed = 1


def test_each_profiling_flag_turns_the_profiler_on():
    assert not parsed().enable_pytorch_profiler
    for flags in (("--profile-dir", "x"), ("--profile-memory",), ("--profile-operators",), ("--profile-attention-only",)):
        assert parsed(*flags).enable_pytorch_profiler, flags


# ---------------------------------------------------------------------------------------------------------- switches


def switches(*flags: str) -> dict[str, bool | str]:
    parser = cli.Parser(None)
    cli.add_switches(parser, SWITCHES)
    return cli.switches(parser.parse_args(flags), SWITCHES)


ON, OFF = dict.fromkeys(SWITCHES, True), dict.fromkeys(SWITCHES, False)
CHOICES = [
    ([], SWITCHES),
    (["--disable-qkv-fusion"], SWITCHES | {"qkv-fusion": False}),
    (["--enable-all-fusion"], ON),
    (["--disable-all-fusion"], OFF),
    (["--disable-all-fusion", "--enable-qkv-fusion"], OFF | {"qkv-fusion": True}),
    (["--disable-flash-attention", "--enable-all-fusion"], ON | {"flash-attention": False}),
    (["--enable-torch-compile", "--torch-compile-mode", "max-autotune"], SWITCHES | {"torch-compile": "max-autotune"}),
]


@pytest.mark.parametrize(("flags", "expected"), CHOICES, ids=[" ".join(flags) for flags, _ in CHOICES])
def test_one_switch_wins_over_all_of_them_over_the_defaults(monkeypatch, flags, expected):
    monkeypatch.delenv("PYTORCH_FALLBACK_ATTENTION", raising=False)
    assert switches(*flags) == expected


@pytest.mark.parametrize("name", ["fp8", "exact-attention"])
def test_all_fusion_leaves_alone_what_fuses_nothing(name):
    defaults, parser = {"qkv-fusion": False, name: False}, cli.Parser(None)
    cli.add_switches(parser, defaults)
    for flags, expected in ((["--enable-all-fusion"], False), (["--disable-all-fusion", f"--enable-{name}"], True)):
        assert cli.switches(parser.parse_args(flags), defaults)[name] is expected


def test_the_environment_keeps_flash_attention_off(monkeypatch):
    monkeypatch.setenv("PYTORCH_FALLBACK_ATTENTION", "1")
    assert switches("--enable-flash-attention", "--enable-all-fusion") == ON | {"flash-attention": False}
    assert cli.switches(cli.Parser(None).parse_args([]), {"triton-norm": True}) == {"triton-norm": True}


# -------------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize("error, code", [
    (KeyboardInterrupt(), 130), (signals.Stopped(15), 143), (signals.Stopped(1), 129), (BrokenPipeError(), 141),
    (OSError(28, "No space"), 1), (RunError("x"), 1), (UsageError("x"), 2),
])  # fmt: skip
def test_exit_codes(error, code):
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        cli.command(main)
    assert ended.value.code == code


@pytest.mark.parametrize(("arguments", "named"), [
    (["--output", "{0}/file"], "--output: {0}/file/x.json: Permission denied"),
    (["--device=cpu", "--output={0}", "--top", "3"], "--output: {0}/file/x.json: Permission denied"),
    (["--dir", "{0}", "--output", "{0}/file/x.json"], "--output: {0}/file/x.json: Permission denied"),
    (["{0}/file"], "{0}/file/x.json: Permission denied"),
    (["--dir", "{0}/fil", "{0}"], "--dir: {0}/file/x.json: Permission denied"),
])  # fmt: skip
def test_a_file_that_may_not_be_used_is_wrong_input_of_its_flag(monkeypatch, tmp_path, capsys, arguments, named):
    def main() -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "file/x.json"))

    monkeypatch.setattr(sys, "argv", ["script", *(each.format(tmp_path) for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.command(main)
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {named.format(tmp_path)}\n"


def test_a_name_that_the_terminal_cannot_print_does_not_end_a_command(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with pytest.raises(SystemExit) as ended:
        cli.command(lambda: print("written: \N{LATIN CAPITAL LETTER L WITH STROKE}.json"))
    assert not ended.value.code and sys.stdout.buffer.getvalue() == b"written: ?.json\n"
