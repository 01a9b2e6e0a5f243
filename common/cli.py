"""The command line that all versions share, and how a command ends."""

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

from common import config as configs
from common import ranks, signals
from common.errors import RunError, UsageError
from common.options import Options, RunOptions
from common.precision import AMP_DTYPES

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
LONGEST_MESSAGE = 300  # characters of what argparse says, which repeats what was given


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and which takes no abbreviated flags. One process of a node shows them."""

    def __init__(self, description: str | None, **kwargs) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        shown = message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}..."
        self.exit(2, f"error: {shown} (--help lists the flags)\n" if ranks.here().local_rank == 0 else None)

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
    """Checks the values of a flag that takes a list.

    Args:
        valid: those that there are; empty if there is no such choice.

    Raises:
        UsageError: a value is unknown or given twice.
    """
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


# Flags that other scripts have too. Each function adds its own to a parser or to a group of one.
Flags = argparse._ActionsContainer


def add_preset(group: Flags) -> None:
    group.add_argument("--preset", choices=configs.PRESETS, default="tiny", help="named sizes (default: tiny)")
    overriding = "file whose sections `model:` and `training:` override the preset"
    group.add_argument("--config", type=Path, metavar="FILE.yaml", help=overriding)


def add_batch_size(group: Flags) -> None:
    group.add_argument("--batch-size", type=int, metavar="B", help="sequences in a step (default: 8, or the preset's)")


def add_sequence_length(group: Flags) -> None:
    group.add_argument("--seq-len", type=int, metavar="S", help="tokens in a sequence (default: 128, or the preset's)")


def add_seed(group: Flags) -> None:
    group.add_argument("--seed", type=int, help="seed of weights and data (default: 0)")


def add_device(group: Flags) -> None:
    devices = ("auto", "cpu", "cuda")
    group.add_argument("--device", choices=devices, default="auto", help="cuda also means AMD's ROCm (default: auto)")


def add_precision(group: Flags) -> None:
    group.add_argument("--use-amp", action="store_true", help="mixed precision by autocast")
    group.add_argument("--amp-dtype", choices=AMP_DTYPES, help="number format of --use-amp (default: bfloat16)")


def add_capture(group: Flags) -> None:
    captured = "run the whole step as one CUDA or HIP graph (GPU only; Version 4 does so by default)"
    group.add_argument("--capture-step", action=argparse.BooleanOptionalAction, help=captured)


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
    """Which switches of a version are on: its defaults, or all or none (`all-fusion`), and then each as it was given.

    A mode of torch.compile stands in place of True.

    PYTORCH_FALLBACK_ATTENTION=1 in the environment keeps flash attention off.

    Raises:
        UsageError: a mode for torch.compile is given, but it is off.
    """
    given = {name: getattr(arguments, name.replace("-", "_"), None) for name in (*defaults, "all-fusion")}
    every = given.pop("all-fusion")
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1" and "flash-attention" in defaults:
        given["flash-attention"] = False
    result: dict[str, bool | str] = {
        name: next(value for value in (given[name], every, default) if value is not None) for name, default in defaults.items()
    }
    if mode := getattr(arguments, "torch_compile_mode", None):
        if not result["torch-compile"]:
            raise UsageError("--torch-compile-mode needs --enable-torch-compile")
        result["torch-compile"] = mode
    return result


def amp_dtype(options: Options | argparse.Namespace) -> torch.dtype | None:
    """What `add_precision`'s flags ask of autocast; None without --use-amp. UsageError: --amp-dtype without it."""
    if options.amp_dtype and not options.use_amp:
        raise UsageError("--amp-dtype has no effect without --use-amp")
    return AMP_DTYPES[options.amp_dtype or "bfloat16"] if options.use_amp else None


def parser(description: str | None, switches: Mapping[str, bool] | None = None) -> Parser:
    """All flags that every version has, and those of its switches. `parse` turns them into options."""
    result = Parser(description)
    group = result.add_argument_group("model")
    add_preset(group)
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

    add_batch_size(group)
    add_sequence_length(group)
    group.add_argument("--num-steps", type=int, help="optimizer steps (default: 300)")
    group.add_argument("--learning-rate", type=float, help="learning rate of AdamW (default: the preset's; tiny: 1.5e-3)")
    add_seed(group)
    number("--warmup-steps", 3, "N", "passes before the first step, neither timed nor trained on (default: 3)")
    text = "text to train on (default: the Python standard library's source)"
    group.add_argument("--data", default="stdlib", metavar="stdlib|synthetic|FILE", help=text)
    add_device(group)
    add_precision(group)
    add_capture(group)
    on("--allow-tf32", "let fp32 matrix products round to TF32 (NVIDIA)")
    number("--log-every", 20, "N", "steps between lines (default: 20)")
    path("--metrics-out", "FILE", "file for the record (default: metrics_<version>.json)")
    path("--save-model", "DIR", "save a checkpoint that transformers opens")
    path("--checkpoint-dir", "DIR", "save all that the next step needs at the end of the run, in DIR/step-N")
    number("--checkpoint-every", None, "N", "save also every N steps; the two newest are kept")
    on("--resume", "go on from the newest checkpoint in --checkpoint-dir, or start if there is none")

    group = result.add_argument_group("several processes (torchrun --nproc-per-node N SCRIPT ...; --batch-size is of each)")
    form = "DistributedDataParallel, the same with a sharded optimizer, or fully_shard (default under torchrun: ddp)"
    group.add_argument("--parallel", choices=ranks.FORMS, help=form)
    number("--distributed-timeout", 600, "SECONDS", "how long a process waits for the others before the job fails (default: 600)")

    group = result.add_argument_group("profiling (each of these that writes a profile turns the profiler on)")
    on("--enable-pytorch-profiler", "profile the last steps of the run")
    path("--profile-dir", "DIR", "folder for profiles (default: pytorch_profiles)")
    number("--profile-steps", 3, "N", "steps to profile, fewer if --num-steps is short (default: 3)")
    on("--profile-memory", "record every allocation and draw memory_timeline.html", "--enable-memory-profiling")
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
    """As `parse`, for a program with flags of its own; `kind` as in `resolve`.

    Raises:
        UsageError: a value is wrong, or contradicts another.
    """
    options, every = resolve(kind, arguments, switches), arguments.enable_all_profiling
    asked = ("dir", "memory", "operators", "attention_only", "with_stack", "with_flops")
    profiled = every or any(getattr(arguments, f"profile_{what}") for what in asked)
    options = replace(
        options,
        profile_memory=options.profile_memory or every,
        profile_operators=options.profile_operators or every,
        enable_pytorch_profiler=options.enable_pytorch_profiler or profiled,
        profile_dir=options.profile_dir or Path("pytorch_profiles"),
        enable_deepspeed_flops=options.enable_deepspeed_flops or every or options.flops_dir is not None,
        flops_dir=options.flops_dir or Path("flops_analysis"),
    )
    if options.parallel and not ranks.here().launched:
        parallel = options.parallel
        raise UsageError(f"--parallel {parallel} needs torchrun: torchrun --nproc-per-node 2 SCRIPT --parallel {parallel} ...")
    if (options.resume or options.checkpoint_every) and not options.checkpoint_dir:
        raise UsageError(f"{'--resume' if options.resume else '--checkpoint-every'} needs a folder: add --checkpoint-dir")
    if options.time_phases and options.capture_step:
        raise UsageError("--time-phases needs the host between the phases, which --capture-step removes: leave one of them out")
    if options.profile_with_flops and options.profile_attention_only:
        raise UsageError("--profile-with-flops counts the whole step: leave --profile-attention-only out")
    if options.sort_by and "memory" in options.sort_by and not options.profile_memory:
        raise UsageError(f"--sort-by {options.sort_by} needs the memory to be recorded: add --profile-memory")
    return options


def resolve(kind: type[Kind], arguments: argparse.Namespace, defaults: Mapping[str, bool] | None = None) -> Kind:
    """Options from flags: what was left out is filled in from preset and file.

    Args:
        kind: the class of the options. Each of its fields without a default is a flag, or comes from the preset.
        arguments: with --preset and --config, and any of the flags that override them.
        defaults: of the version's switches.

    Raises:
        UsageError: a value is wrong, or contradicts another.
    """
    given = vars(arguments)
    sections = {section: {key: given.get(flag) for key, flag in flags.items()} for section, flags in OVERRIDES.items()}
    config = configs.resolve(given["preset"], given["config"], **sections)
    values = given | {flag: getattr(config.training, key) for key, flag in OVERRIDES["training"].items()}
    values |= {"model": config.model, "switches": switches(arguments, defaults or {})}
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def require(module: str) -> None:
    """Ends a script that cannot be imported without the module in one line, with exit code 2; before the script's imports."""
    if not importlib.util.find_spec(module):
        print(f"error: {module} is not installed here, and this script needs it", file=sys.stderr)
        sys.exit(2)


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

    Of several processes one a node says that the input is wrong, and each says why it failed, unless they all fail alike.
    """
    here = ranks.here()
    try:
        with signals.raised():
            code = main() or 0
            if sys.stdout:  # None where it was closed beforehand
                sys.stdout.flush()  # or what cannot be written would show only after the exit code is chosen
    except UsageError as error:
        code = _end(f"error: {error}" if here.local_rank == 0 else None, 2)
    except RunError as error:
        rank = f"rank {here.rank}: " if here.world_size > 1 and not error.shared else ""
        code = _end(f"error: {rank}{error}" if here.main_process or not error.shared else None, 1)
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
