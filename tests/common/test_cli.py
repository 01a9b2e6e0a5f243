"""The shared command line: flags, switches, signals, and how a command ends."""

import argparse
import os
import signal
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

from common import cli
from tests.conftest import run_options
from tracepage.errors import RunError, UsageError
from version1_pytorch_baseline import tiny_llama_v1

import pytest

SWITCHES = {"qkv-fusion": True, "flash-attention": True, "torch-compile": False}


def parsed(*flags: str):
    return run_options(tiny_llama_v1, *flags)


BAD_FLAGS = {
    "--num-heads 7": "hidden_size 256 is not divisible by num_attention_heads 7",
    "--hidden-dim 24": "head dimension 24 / 8 = 3 is odd",
    "--num-layers 0": "--num-layers: '0' is not a positive whole number",
    "--learning-rate -1": "training.learning_rate = -1.0: input should be greater than 0",
    "--seed -1": "training.seed = -1: input should be greater than or equal to 0",
    "--preset huge": "--preset: invalid choice: 'huge'",
    "--batch 8": "unrecognized arguments: --batch 8",
    "--config nowhere.yaml": "cannot read nowhere.yaml",
    "--amp-dtype float16": "no effect without --use-amp",
    "--resume": "add --checkpoint-dir",
    "--lr-warmup-steps 300": "less than the steps of the schedule (300)",
    "--eval-steps -1": "--eval-steps must be 0 or more, not -1",
    "--parallel ddp": "needs torchrun",
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.items(), ids=BAD_FLAGS)
def test_bad_flags_end_in_one_line_and_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.command(lambda: parsed(*flags.split()) and None)
    printed = capsys.readouterr()
    assert (end.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("error: ") and message in printed.err


def test_numbers_of_flags():
    assert [cli.positive(text) for text in ("1", "0007")] == [1, 7] and cli.positive_list(
        "1, 2,3"
    ) == [1, 2, 3]
    assert [cli.amount(text) for text in ("0", "1e-3", "2.5")] == [0, 1e-3, 2.5]
    for text in ("0", "", "-1", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.positive(text)
    for text in ("nan", "inf", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not a number from 0 on"):
            cli.amount(text)


def test_flags_reach_the_configuration():
    flags = "--preset small --hidden-dim 64 --num-heads 4 --num-kv-heads 2 --num-layers 1 --intermediate-dim 96 --vocab-size 300"
    training = "--batch-size 2 --seq-len 32 --num-steps 5 --learning-rate 1e-2 --seed 9"
    options = parsed(*flags.split(), *training.split())
    model = options.model
    assert (
        model.hidden_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.num_layers,
    ) == (64, 4, 2, 1)
    assert (model.intermediate_size, model.vocab_size) == (96, 300)
    assert (
        options.batch_size,
        options.seq_len,
        options.num_steps,
        options.learning_rate,
        options.seed,
    ) == (2, 32, 5, 0.01, 9)
    with pytest.raises(FrozenInstanceError):
        options.seed = 1


def test_each_profiling_flag_turns_the_profiler_on():
    assert not parsed().enable_pytorch_profiler
    for flags in (
        ("--profile-dir", "x"),
        ("--profile-steps", "2"),
        ("--profile-memory",),
        ("--sort-by", "count"),
        ("--enable-all-profiling",),
    ):
        assert parsed(*flags).enable_pytorch_profiler, flags
    assert parsed("--sort-by", "count").profile_operators


# ------------------------------------------------------------------------------------------------------------- switches


def switches(*flags: str, defaults: dict[str, bool] = SWITCHES) -> dict[str, bool | str]:
    parser = argparse.ArgumentParser()
    cli.add_switches(parser, defaults)
    return cli.switches(cli.parse(parser, flags), defaults)


ON, OFF = dict.fromkeys(SWITCHES, True), dict.fromkeys(SWITCHES, False)
CHOICES = [
    ([], SWITCHES),
    (["--disable-qkv-fusion"], SWITCHES | {"qkv-fusion": False}),
    (["--enable-all-fusion"], ON),
    (["--disable-all-fusion", "--enable-qkv-fusion"], OFF | {"qkv-fusion": True}),
    (["--disable-flash-attention", "--enable-all-fusion"], ON | {"flash-attention": False}),
    (
        ["--enable-torch-compile", "--torch-compile-mode", "max-autotune"],
        SWITCHES | {"torch-compile": "max-autotune"},
    ),
]


@pytest.mark.parametrize(
    ("flags", "expected"), CHOICES, ids=[" ".join(flags) for flags, _ in CHOICES]
)
def test_one_switch_wins_over_all_of_them_over_the_defaults(monkeypatch, flags, expected):
    monkeypatch.delenv("PYTORCH_FALLBACK_ATTENTION", raising=False)
    assert switches(*flags) == expected


@pytest.mark.parametrize("name", ["fp8", "fa4", "fp32-residual-gradient", "bf16-moments"])
def test_all_fusion_leaves_alone_what_fuses_nothing(name):
    assert switches("--enable-all-fusion", defaults={"qkv-fusion": False, name: False}) == {
        "qkv-fusion": True,
        name: False,
    }


def test_the_environment_keeps_flash_attention_off(monkeypatch):
    monkeypatch.setenv("PYTORCH_FALLBACK_ATTENTION", "1")
    assert switches("--enable-flash-attention", "--enable-all-fusion") == ON | {
        "flash-attention": False
    }


# ----------------------------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    "error, code",
    [
        (KeyboardInterrupt(), 130),
        (cli.Stopped(15), 143),
        (cli.Stopped(1), 129),
        (BrokenPipeError(), 141),
        (OSError(28, "No space"), 1),
        (PermissionError(13, "Permission denied", "x"), 2),
        (RunError("x"), 1),
        (UsageError("x"), 2),
    ],
)
@pytest.mark.usefixtures("capsys")  # A closed pipe replaces the file of stdout, here none.
def test_exit_codes(error, code):
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        cli.command(main)
    assert ended.value.code == code


def test_a_list_may_keep_the_quotes_of_a_shell():
    assert cli.positive_list('"4,8, 16"') == [4, 8, 16]


# ----------------------------------------------------------------------------------------- signals


@pytest.fixture
def ordinary_handlers() -> Iterator[None]:
    """Those of a process that was started from a terminal."""
    ordinary = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {kind: signal.signal(kind, handler) for kind, handler in ordinary.items()}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def send(kind: int) -> None:
    os.kill(os.getpid(), kind)


@pytest.mark.usefixtures("ordinary_handlers")
@pytest.mark.parametrize("kind", cli.ENDING)
def test_a_signal_is_an_exception(kind):
    with pytest.raises(KeyboardInterrupt) as ended, cli.signals_raised():
        send(kind)
    assert (
        cli.signal_number(ended.value) == kind
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )


@pytest.mark.usefixtures("ordinary_handlers")
def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with cli.signals_raised(), cli.signals_postponed(), cli.signals_deferred() as received:
        send(signal.SIGHUP)
    assert received == []
    with cli.signals_deferred():
        noting = signal.getsignal(signal.SIGTERM)
        with cli.signals_raised():
            assert signal.getsignal(signal.SIGTERM) == noting, "and what has a handler keeps it"


@pytest.mark.usefixtures("ordinary_handlers")
@pytest.mark.parametrize("kind", cli.ENDING)
def test_the_first_signal_is_noted_and_the_second_raised(kind):
    with pytest.raises(cli.Stopped) as ended, cli.signals_deferred() as received:
        send(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        send(kind)
    assert cli.signal_number(ended.value) == kind


@pytest.mark.usefixtures("ordinary_handlers")
def test_a_postponed_signal_takes_effect_at_the_end():
    done = []
    with pytest.raises(cli.Stopped) as ended, cli.signals_raised():
        with cli.signals_postponed():
            send(signal.SIGTERM)
            send(signal.SIGHUP)
            done.append("the work")
        done.append("what follows")
    assert done == ["the work"] and cli.signal_number(ended.value) == signal.SIGTERM, (
        "the first one's exit code"
    )


@pytest.mark.usefixtures("ordinary_handlers")
def test_an_error_in_the_work_is_not_replaced_by_the_signal():
    with pytest.raises(OSError), cli.signals_raised(), cli.signals_postponed():
        send(signal.SIGTERM)
        raise OSError


@pytest.mark.usefixtures("ordinary_handlers")
def test_handlers_that_were_there_before_python_are_no_obstacle(monkeypatch):
    """rocprofv3 installs its own in C; of those Python says None, and cannot put them back."""
    real = signal.signal
    with monkeypatch.context() as patch:
        patch.setattr(cli.signal, "signal", lambda kind, handler: real(kind, handler) and None)
        with cli.signals_deferred() as received:
            send(signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
