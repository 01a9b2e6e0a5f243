"""The command line that all scripts share: flags, how they become options, and how a command ends."""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from common import ROOT
from tracepage.command_line import exit_code, parse, parse_known, require

PACKAGES = (
    "ijson",
    "jinja2",
    "matplotlib",
    "numpy",
    "pandas",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "yaml",
)
require(PACKAGES, f"run `make setup` in {ROOT}, then `source {ROOT}/.venv/bin/activate`")

from common import config as configs
from common import ranks, signals
from common.options import MODEL, PROCESSES, PROFILING, TRAINING, Options, RunOptions
from tracepage.errors import RunError, UsageError

__all__ = ["parse", "parse_known"]  # scripts take these from here, too

Kind = TypeVar("Kind", bound=Options)
RunKind = TypeVar("RunKind", bound=RunOptions)
Flags = argparse._ActionsContainer  # a parser, or a group of one

OVERRIDES = {  # section of the configuration: its key, and the flag that overrides it
    "model": {
        "hidden_size": "hidden_dim",
        "num_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "intermediate_dim",
        "vocab_size": "vocab_size",
    },
    "training": {
        "batch_size": "batch_size",
        "sequence_length": "seq_len",
        "num_steps": "num_steps",
        "learning_rate": "learning_rate",
        "seed": "seed",
    },
}
# switches that fuse nothing, so `all-fusion` leaves them as they are
ALONE = ("exact-attention", "fa4", "fp8")
GRACE = 1.0  # seconds


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isascii() or not text.isdigit() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positive_list(text: str) -> list[int]:
    """ "4,8,16" -> [4, 8, 16]; also with quotes that a shell has left around it."""
    return [positive(item.strip()) for item in text.strip("\"'").split(",")]


def amount(text: str) -> float:
    """ "1e-3" -> 0.001."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add(group: Flags, *flags: str) -> None:
    """Adds flags of RunOptions, such as "--device"."""
    declared = {_flag(field.name): field for field in fields(RunOptions)}
    for flag in flags:
        field = declared[flag]
        taken = {
            key: value for key, value in field.metadata.items() if key not in ("group", "also")
        }
        kinds = [kind for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
        if field.type is bool:
            taken |= {"action": "store_true", "default": False}
        elif kinds == [bool]:
            taken["action"] = argparse.BooleanOptionalAction
        elif "choices" not in taken:
            taken.setdefault("type", positive if kinds == [int] else kinds[0])
        if (
            taken["default"] is not None
            and field.type is not bool
            and "(default" not in taken["help"]
        ):
            taken["help"] += f" (default: {taken['default']})"
        group.add_argument(flag, *filter(None, [field.metadata.get("also")]), **taken)


def _add_group(parser: argparse.ArgumentParser, name: str) -> Flags:
    """Adds all flags of a group of RunOptions."""
    group = parser.add_argument_group(name)
    add(
        group,
        *(_flag(field.name) for field in fields(RunOptions) if field.metadata.get("group") == name),
    )
    return group


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--preset, --config, and the sizes of a model."""
    group = _add_group(parser, MODEL)
    for (key, flag), letter in zip(OVERRIDES["model"].items(), "DLHKFV", strict=True):
        shown = (
            "key/value heads; fewer than H: grouped-query attention (default: H)"
            if letter == "K"
            else key.replace("_", " ")
        )
        group.add_argument(_flag(flag), type=positive, metavar=letter, help=shown)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    _add_group(parser, TRAINING)
    _add_group(parser, PROCESSES)


def add_profiling_flags(parser: argparse.ArgumentParser) -> None:
    _add_group(parser, PROFILING)


def add_switches(parser: argparse.ArgumentParser, switches: Mapping[str, bool]) -> None:
    """`--enable-X` and `--disable-X` for each switch of a version, and for all of them together
    (`all-fusion`).
    """
    on = [name for name, value in switches.items() if value]
    group = parser.add_argument_group(f"switches (on unless switched off: {', '.join(on)})")
    for name in (*switches, "all-fusion"):
        choice = group.add_mutually_exclusive_group()
        key = name.replace("-", "_")
        choice.add_argument(f"--enable-{name}", dest=key, action="store_true", default=None)
        choice.add_argument(f"--disable-{name}", dest=key, action="store_false", default=None)
    if "torch-compile" in switches:
        modes = ("default", "reduce-overhead", "max-autotune")
        group.add_argument(
            "--torch-compile-mode", choices=modes, help="mode of torch.compile (default: default)"
        )


def add_output_dir(group: Flags, default: str) -> None:
    group.add_argument(
        "--output-dir", type=Path, default=Path(default), metavar="DIR", help=f"default: {default}"
    )


def switches(arguments: argparse.Namespace, defaults: Mapping[str, bool]) -> dict[str, bool | str]:
    """Which switches of a version are on: its defaults, or all or none that fuse (`all-fusion`),
    then each as it was given.

    A mode of torch.compile stands in place of True; UsageError if it is off.
    PYTORCH_FALLBACK_ATTENTION=1 in the environment keeps flash attention off.
    """
    given = {
        name: getattr(arguments, name.replace("-", "_"), None) for name in (*defaults, "all-fusion")
    }
    every = given.pop("all-fusion")
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1" and "flash-attention" in defaults:
        given["flash-attention"] = False
    result: dict[str, bool | str] = {
        name: next(
            value
            for value in (given[name], None if name in ALONE else every, default)
            if value is not None
        )
        for name, default in defaults.items()
    }
    if mode := getattr(arguments, "torch_compile_mode", None):
        if not result["torch-compile"]:
            raise UsageError("--torch-compile-mode needs --enable-torch-compile")
        result["torch-compile"] = mode
    return result


def resolve(
    kind: type[Kind], arguments: argparse.Namespace, defaults: Mapping[str, bool] | None = None
) -> Kind:
    """Options of a class from flags, filled in from preset and file; `defaults` are the version's
    switches.

    A flag that the script does not have stands at its default. UsageError: a value is wrong, or
    contradicts another.
    """
    given: dict[str, Any] = {
        field.name: field.metadata.get("default") for field in fields(kind) if field.metadata
    }
    given |= vars(arguments)
    sections = {
        section: {key: given.get(flag) for key, flag in flags.items()}
        for section, flags in OVERRIDES.items()
    }
    config = configs.resolve(given["preset"], given["config"], **sections)
    values = given | {
        flag: getattr(config.training, key) for key, flag in OVERRIDES["training"].items()
    }
    values |= {"model": config.model, "switches": switches(arguments, defaults or {})}
    if values.get("amp_dtype") and not values.get("use_amp"):
        raise UsageError("--amp-dtype has no effect without --use-amp")
    options = kind(
        **{field.name: values[field.name] for field in fields(kind) if field.name in values}
    )
    return _checked(options) if isinstance(options, RunOptions) else options


def _checked(given: RunKind) -> RunKind:
    """The options of a run with what flags imply. UsageError: a value contradicts another, or has
    no effect.
    """
    every = given.enable_all_profiling
    asked = ("dir", "steps", "memory", "operators", "attention_only", "with_stack", "with_flops")
    profiled = given.sort_by or any(getattr(given, f"profile_{name}") for name in asked)
    options = replace(
        given,
        profile_memory=given.profile_memory or every,
        profile_operators=given.profile_operators or every or given.sort_by is not None,
        enable_pytorch_profiler=given.enable_pytorch_profiler or every or bool(profiled),
        profile_dir=given.profile_dir or Path("pytorch_profiles"),
        profile_steps=given.profile_steps or 3,
        enable_deepspeed_flops=given.enable_deepspeed_flops or every or given.flops_dir is not None,
        flops_dir=given.flops_dir or Path("flops_analysis"),
    )
    scheduled = options.lr_decay_steps or options.num_steps
    refused = {
        f"--parallel {options.parallel} needs torchrun: torchrun --standalone --nproc-per-node 2 SCRIPT --parallel ...": options.parallel
        and not ranks.here().launched,
        "--resume and --checkpoint-every need a folder: add --checkpoint-dir": (
            options.resume or options.checkpoint_every
        )
        and not options.checkpoint_dir,
        "--lr-decay-steps has no effect with a constant learning rate: add --lr-schedule cosine": options.lr_decay_steps
        and options.lr_schedule == "constant",
        f"--lr-warmup-steps must be 0 or more, and less than the steps of the schedule ({scheduled})": not 0
        <= options.lr_warmup_steps
        < scheduled,
        f"--eval-steps must be 0 or more, not {options.eval_steps}": options.eval_steps < 0,
        "--time-phases needs the host between the phases, which --capture-step removes: leave one of them out": options.time_phases
        and options.capture_step,
        "--profile-with-flops counts the whole step: leave --profile-attention-only out": options.profile_with_flops
        and options.profile_attention_only,
        f"--sort-by {options.sort_by} needs the memory to be recorded: add --profile-memory": "memory"
        in (options.sort_by or "")
        and not options.profile_memory,
    }
    for message, wrong in refused.items():
        if wrong:
            raise UsageError(message)
    return options


def command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script's main function and exits, with the exit codes of
    `tracepage.command_line.exit_code`.
    """
    with signals.raised():
        code = exit_code(main, _end_of_a_rank)
    # before Python 3.14, a thread of gloo that gives a tensor back after Python's end aborts the
    # process
    if ranks.gloo_started:
        os._exit(code)
    sys.exit(code)


def _end_of_a_rank(error: UsageError | RunError) -> None:
    """Prints the error. Of several processes each names its rank, unless all end alike.

    Where the first of all, or of a node, may say the same, the others wait for GRACE seconds:
    torchrun ends them meanwhile.
    """
    here = ranks.here()
    if (here.rank and error.shared) or (here.local_rank and isinstance(error, UsageError)):
        time.sleep(GRACE)
    if here.main_process or not error.shared:
        print(
            f"error: {f'rank {here.rank}: ' * (here.world_size > 1 and not error.shared)}{error}",
            file=sys.stderr,
            flush=True,
        )
