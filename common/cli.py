"""The command line that all versions share, and how a command ends."""

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from common import config as configs
from common import loading, ranks, signals  # noqa: F401  # `loading` for what it prints
from common.errors import RunError, UsageError
from common.files import inputs_kept
from common.options import Options, RunOptions
from common.precision import AMP_DTYPES
from common.terminal import replace_unprintable

import torch

Kind = TypeVar("Kind", bound=Options)
RunKind = TypeVar("RunKind", bound=RunOptions)

# What --sort-by takes: torch.profiler's names; `cuda_` is today's `device_`.
SORT_KEYS = (
    "cpu_time_total", "self_cpu_time_total", "cuda_time_total", "self_cuda_time_total", "device_time_total",
    "self_device_time_total", "cpu_memory_usage", "cuda_memory_usage", "device_memory_usage", "count",
)  # fmt: skip
OVERRIDES = {  # section of the configuration: its key, and the flag that overrides it
    "model": {
        "hidden_size": "hidden_dim", "num_layers": "num_layers", "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads", "intermediate_size": "intermediate_dim", "vocab_size": "vocab_size",
    },
    "training": {
        "batch_size": "batch_size", "sequence_length": "seq_len", "num_steps": "num_steps", "learning_rate": "learning_rate",
        "seed": "seed",
    },
}  # fmt: skip
SCHEDULES = ("constant", "cosine")
ALONE = ("exact-attention", "fp8")  # switches that fuse nothing, so `all-fusion` leaves them as they are
LONGEST_MESSAGE = 300  # characters of what argparse says, which repeats what was given
GRACE = 1.0  # seconds


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors, and which takes no abbreviated flags."""

    def __init__(self, description: str | None, **kwargs) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        shown = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}..."
        raise UsageError(f"{shown} (--help lists the flags)")

    def print_help(self, file=None) -> None:
        if ranks.here().main_process:
            super().print_help(file)


def positive(text: str) -> int:
    """A whole number from 1 to the largest that the configuration takes."""
    if not text.isascii() or not text.isdigit() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    if len(text.lstrip("0")) > len(str(configs.LARGEST)) or int(text) > configs.LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is above {configs.LARGEST:,}")
    return int(text)


def positive_list(text: str) -> list[int]:
    """ "4,8,16" -> [4, 8, 16]."""
    return [positive(item.strip()) for item in text.split(",")]


def check_list(flag: str, values: Sequence[object], valid: Collection[str] = ()) -> None:
    """Raises UsageError if a flag's list has a value twice, or one that is not in `valid`, unless that is empty."""
    for value in values:
        if valid and value not in valid:
            raise UsageError(f"{flag}: there is no {value!r}; there are {', '.join(valid)}")
        if values.count(value) > 1:
            raise UsageError(f"{flag}: {value} is given twice")


def amount(text: str) -> float:
    """ "1e-3" -> 0.001."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


Flags = argparse._ActionsContainer  # a parser, or a group of one
SHARED: dict[str, dict[str, Any]] = {  # flags that other scripts have too
    "--preset": dict(choices=configs.PRESETS, default="tiny", help="named sizes (default: tiny)"),
    "--config": dict(type=Path, metavar="FILE.yaml", help="file whose sections `model:` and `training:` override the preset"),
    "--batch-size": dict(type=int, metavar="B", help="sequences in a step (default: 8, or the preset's)"),
    "--seq-len": dict(type=int, metavar="S", help="tokens in a sequence (default: 128, or the preset's)"),
    "--seed": dict(type=int, help="seed of weights and data (default: 0)"),
    "--device": dict(choices=("auto", "cpu", "cuda"), default="auto", help="cuda also means AMD's ROCm (default: auto)"),
    "--use-amp": dict(action="store_true", help="mixed precision by autocast"),
    "--amp-dtype": dict(choices=AMP_DTYPES, help="number format of --use-amp (default: bfloat16)"),
    "--capture-step": dict(
        action=argparse.BooleanOptionalAction,
        help="run the whole step as one CUDA or HIP graph (GPU only; Version 4 does so by default)",
    ),
}


def add(group: Flags, *flags: str) -> None:
    """Adds flags of SHARED."""
    for flag in flags:
        group.add_argument(flag, **SHARED[flag])


def add_output_dir(group: Flags, default: str) -> None:
    group.add_argument("--output-dir", type=Path, default=Path(default), metavar="DIR", help=f"default: {default}")


def add_switches(parser: argparse.ArgumentParser, switches: Mapping[str, bool]) -> None:
    """`--enable-X` and `--disable-X` for each switch of a version, and for all of them together (`all-fusion`)."""
    on = [name for name, value in switches.items() if value]
    group = parser.add_argument_group(f"switches (on unless switched off: {', '.join(on)})")
    for name in (*switches, "all-fusion"):
        choice, key = group.add_mutually_exclusive_group(), name.replace("-", "_")
        choice.add_argument(f"--enable-{name}", dest=key, action="store_true", default=None)
        choice.add_argument(f"--disable-{name}", dest=key, action="store_false", default=None)
    if "torch-compile" in switches:
        modes = ("default", "reduce-overhead", "max-autotune")
        group.add_argument("--torch-compile-mode", choices=modes, help="mode of torch.compile (default: default)")


def switches(arguments: argparse.Namespace, defaults: Mapping[str, bool]) -> dict[str, bool | str]:
    """Which switches of a version are on: its defaults, or all or none that fuse (`all-fusion`), then each as it was given.

    A mode of torch.compile stands in place of True; UsageError if it is off. PYTORCH_FALLBACK_ATTENTION=1 in the environment
    keeps flash attention off.
    """
    given = {name: getattr(arguments, name.replace("-", "_"), None) for name in (*defaults, "all-fusion")}
    every = given.pop("all-fusion")
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1" and "flash-attention" in defaults:
        given["flash-attention"] = False
    result: dict[str, bool | str] = {
        name: next(value for value in (given[name], None if name in ALONE else every, default) if value is not None)
        for name, default in defaults.items()
    }
    if mode := getattr(arguments, "torch_compile_mode", None):
        if not result["torch-compile"]:
            raise UsageError("--torch-compile-mode needs --enable-torch-compile")
        result["torch-compile"] = mode
    return result


def amp_dtype(options: Options | argparse.Namespace) -> torch.dtype | None:
    """What --use-amp and --amp-dtype ask of autocast; None without --use-amp. UsageError: --amp-dtype without it."""
    if options.amp_dtype and not options.use_amp:
        raise UsageError("--amp-dtype has no effect without --use-amp")
    return AMP_DTYPES[options.amp_dtype or "bfloat16"] if options.use_amp else None


def parser(description: str | None, switches: Mapping[str, bool] | None = None) -> Parser:
    """All flags that every version has, and those of its switches. `parse` turns them into options."""
    result = Parser(description)
    group = result.add_argument_group("model")
    add(group, "--preset", "--config")
    group.add_argument("--hidden-dim", type=int, metavar="D")
    group.add_argument("--num-layers", type=int, metavar="L")
    group.add_argument("--num-heads", type=int, metavar="H")
    fewer = "key/value heads; fewer than H: grouped-query attention (default: H)"
    group.add_argument("--num-kv-heads", type=int, metavar="K", help=fewer)
    group.add_argument("--intermediate-dim", type=int, metavar="F")
    group.add_argument("--vocab-size", type=int, metavar="V")

    group = result.add_argument_group("training")

    def number(flag: str, default: int | None, metavar: str, shown: str) -> None:
        group.add_argument(flag, type=positive, default=default, metavar=metavar, help=shown)

    def path(flag: str, metavar: str, shown: str) -> None:
        group.add_argument(flag, type=Path, metavar=metavar, help=shown)

    def on(flag: str, shown: str, *others: str) -> None:
        group.add_argument(flag, *others, action="store_true", help=shown)

    add(group, "--batch-size", "--seq-len")
    group.add_argument("--num-steps", type=int, help="optimizer steps (default: 300)")
    group.add_argument("--learning-rate", type=float, help="learning rate of AdamW (default: the preset's; tiny: 1.5e-3)")
    group.add_argument("--lr-schedule", choices=SCHEDULES, default="constant", help="of the learning rate (default: constant)")
    count = "steps in which the learning rate rises to its full value (default: 0)"
    group.add_argument("--lr-warmup-steps", type=int, default=0, metavar="N", help=count)
    number("--lr-decay-steps", None, "N", "the step at which a cosine has reached 0 (default: --num-steps)")
    add(group, "--seed")
    number("--warmup-steps", 3, "N", "passes before the first step, neither timed nor trained on (default: 3)")
    text = "text to train on (default: the Python standard library's source)"
    group.add_argument("--data", default="stdlib", metavar="stdlib|synthetic|FILE", help=text)
    add(group, "--device", "--use-amp", "--amp-dtype", "--capture-step")
    on("--allow-tf32", "let fp32 matrix products round to TF32 (on an MI300 to XF32)")
    number("--log-every", 20, "N", "steps between lines (default: 20)")
    path("--metrics-out", "FILE", "file for the record (default: metrics_<version>.json)")
    path("--save-model", "DIR", "save a checkpoint that transformers opens")
    path("--checkpoint-dir", "DIR", "save all that the next step needs at the end of the run, in DIR/step-N")
    number("--checkpoint-every", None, "N", "save also every N steps, but none that is profiled; the two newest are kept")
    on("--resume", "go on from the newest checkpoint in --checkpoint-dir, or start if there is none")

    started = "torchrun --standalone --nproc-per-node N SCRIPT ..."
    group = result.add_argument_group(f"several processes ({started}; --batch-size is of each)")
    form = "DistributedDataParallel, the same with a sharded optimizer, or fully_shard (default under torchrun: ddp)"
    group.add_argument("--parallel", choices=ranks.FORMS, help=form)
    number("--distributed-timeout", 600, "SECONDS", "how long a process waits for the others before the job fails (default: 600)")

    group = result.add_argument_group("profiling (each of these that writes a profile turns the profiler on)")
    on("--enable-pytorch-profiler", "profile the last steps of the run")
    path("--profile-dir", "DIR", "folder for profiles (default: pytorch_profiles)")
    number("--profile-steps", None, "N", "steps to profile, fewer if --num-steps is short (default: 3)")
    on("--profile-memory", "record every allocation: memory over time in run.html", "--enable-memory-profiling")
    on("--profile-operators", "print the table of operators")
    order = f"order of that table: {', '.join(SORT_KEYS)} (default: self time)"
    group.add_argument("--sort-by", choices=SORT_KEYS, metavar="KEY", help=order)
    on("--profile-attention-only", "keep only what runs inside the attention span, forward and backward")
    on("--profile-with-stack", "put Python's calls into the trace (slower steps, a larger trace)")
    on("--profile-with-flops", "add torch.profiler's FLOPs, which it counts for few operators")
    on("--enable-deepspeed-flops", "count FLOPs by formula, FlopCounterMode and DeepSpeed")
    path("--flops-dir", "DIR", "where these counts go, and count (default: flops_analysis)")
    on("--enable-all-profiling", "profiler, memory, operator table, FLOPs")
    on("--measure-peak", "time a large GEMM and a copy first; also gives the %% of measured GEMM")
    on("--time-phases", "after the run, time forward, backward and optimizer apart in steps of their own")
    on("--validate-setup", "check the installation and every output, line by line")
    if switches:
        add_switches(result, switches)
    return result


def parse(arguments: argparse.Namespace, switches: Mapping[str, bool] | None = None) -> RunOptions:
    """The options of a run from the flags of `parser`, which got the same switches; errors as in `parse_as`."""
    return parse_as(RunOptions, arguments, switches)


def parse_as(kind: type[RunKind], arguments: argparse.Namespace, switches: Mapping[str, bool] | None = None) -> RunKind:
    """As `parse`, for a program with own flags; `kind` as in `resolve`. UsageError: a value is wrong or contradicts another."""
    options, every = resolve(kind, arguments, switches), arguments.enable_all_profiling
    asked = ("dir", "memory", "operators", "attention_only", "with_stack", "with_flops")
    profiled = every or any(getattr(arguments, f"profile_{what}") for what in asked)
    options = replace(
        options,
        profile_memory=options.profile_memory or every,
        profile_operators=options.profile_operators or every,
        enable_pytorch_profiler=options.enable_pytorch_profiler or profiled,
        profile_dir=options.profile_dir or Path("pytorch_profiles"),
        profile_steps=options.profile_steps or 3,
        enable_deepspeed_flops=options.enable_deepspeed_flops or every or options.flops_dir is not None,
        flops_dir=options.flops_dir or Path("flops_analysis"),
    )
    if options.parallel and not ranks.here().launched:
        flag = f"--parallel {options.parallel}"
        raise UsageError(f"{flag} needs torchrun: torchrun --standalone --nproc-per-node 2 SCRIPT {flag} ...")
    if (options.resume or options.checkpoint_every) and not options.checkpoint_dir:
        raise UsageError(f"{'--resume' if options.resume else '--checkpoint-every'} needs a folder: add --checkpoint-dir")
    if options.lr_decay_steps and options.lr_schedule == "constant":
        raise UsageError("--lr-decay-steps has no effect with a constant learning rate: add --lr-schedule cosine")
    if not 0 <= options.lr_warmup_steps < (options.lr_decay_steps or options.num_steps):
        raise UsageError(
            f"--lr-warmup-steps {options.lr_warmup_steps} must be 0 or more, and less than the steps of the schedule "
            f"({options.lr_decay_steps or options.num_steps})"
        )
    if options.time_phases and options.capture_step:
        raise UsageError("--time-phases needs the host between the phases, which --capture-step removes: leave one of them out")
    if options.profile_with_flops and options.profile_attention_only:
        raise UsageError("--profile-with-flops counts the whole step: leave --profile-attention-only out")
    if arguments.profile_steps and not options.enable_pytorch_profiler:
        raise UsageError("--profile-steps needs the profiler: add --enable-pytorch-profiler")
    if options.sort_by and not options.profile_operators and not hasattr(arguments, "analyze_existing"):
        raise UsageError(f"--sort-by {options.sort_by} orders the table of operators: add --profile-operators")
    if options.sort_by and "memory" in options.sort_by and not options.profile_memory:
        raise UsageError(f"--sort-by {options.sort_by} needs the memory to be recorded: add --profile-memory")
    return options


def resolve(kind: type[Kind], arguments: argparse.Namespace, defaults: Mapping[str, bool] | None = None) -> Kind:
    """Options of a class from flags, filled in from preset and file; `defaults` are the version's switches.

    Each field of `kind` without a default is a flag, or of the preset. UsageError: a value is wrong, or contradicts another.
    """
    given = vars(arguments)
    sections = {section: {key: given.get(flag) for key, flag in flags.items()} for section, flags in OVERRIDES.items()}
    config = configs.resolve(given["preset"], given["config"], **sections)
    values = given | {flag: getattr(config.training, key) for key, flag in OVERRIDES["training"].items()}
    values |= {"model": config.model, "switches": switches(arguments, defaults or {})}
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def flag_of(path: object, arguments: Sequence[str]) -> str | None:
    """The flag among the arguments whose value is the path or a folder around it; the longest value if several are."""
    flag, found = None, {}
    for argument in arguments:
        if argument.startswith("--"):
            flag, _, value = argument.partition("=")
        else:
            value = argument
        around = os.path.abspath(value)
        if flag and value and isinstance(path, str) and f"{os.path.abspath(path)}/".startswith(f"{around.rstrip('/')}/"):
            found[len(around)] = flag
    return found[max(found)] if found else None


def command(main: Callable[[], int | None]) -> None:
    """Runs a script's main function and exits.

    Exit codes: 0 completed, 1 the run failed, 2 the input is wrong, 128 + n stopped by signal n, 141 the reader of our output
    (head, less) has left. Output that cannot be written (a full disk) is a run that failed.

    Of several processes each says with its rank why it ends, unless all end alike. Where the first of all, or of a node, may say
    the same, the others wait for GRACE seconds: if it fails, too, torchrun ends them meanwhile.
    """
    here = ranks.Ranks()
    replace_unprintable(sys.stdout, sys.stderr)
    try:
        here = ranks.here()
        with signals.raised(), inputs_kept():
            code = main() or 0
            if sys.stdout:  # None where it was closed beforehand
                sys.stdout.flush()  # or what cannot be written would show only after the exit code is chosen
    except (UsageError, RunError) as error:
        code, rank = 2 if isinstance(error, UsageError) else 1, f"rank {here.rank}: " if here.world_size > 1 else ""
        if here.rank and error.shared or here.local_rank and code == 2:
            time.sleep(GRACE)
        said = f"error: {error}" if error.shared else f"error: {rank}{error}"
        _end(said if here.main_process or not error.shared else None, code)
    except KeyboardInterrupt as stop:
        number = signals.number(stop)
        code = _end("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}", 128 + number)
    except BrokenPipeError:
        code = 128 + 13  # SIGPIPE, which Python turns into this error
    except PermissionError as error:
        flag = flag_of(error.filename, sys.argv[1:])
        code = _end(f"error: {f'{flag}: ' * bool(flag)}{error.filename}: {error.strerror}", 2)
    except OSError as error:
        code = _end(f"error: {error}", 1)
    _drop_what_cannot_be_written(sys.stdout, sys.stderr)
    if ranks.gloo_started:  # before Python 3.14, a thread of gloo that gives a tensor back after Python's end aborts the process
        os._exit(code)
    sys.exit(code)


def _end(said: str | None, code: int) -> int:
    """Prints why the command ends, if this process is the one that prints, and if its output is still read."""
    with contextlib.suppress(OSError):
        if said:
            print(said, file=sys.stderr, flush=True)
    return code


def _drop_what_cannot_be_written(*streams: TextIO | None) -> None:
    """Python flushes its streams at the end, and would turn a failure into exit code 120."""
    for stream in streams:
        if not stream:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
