"""The flags of runs and comparisons, and the options that they become.

A flag is one `add_argument` with its default and its help. `resolve` fills in preset and file once;
the options are one frozen object afterwards.
"""

import argparse
import math
import os
from argparse import BooleanOptionalAction
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from common import config as configs
from common import ranks
from common.config import PRESETS, ModelConfig, TrainingConfig
from tracepage.errors import UsageError

Kind = TypeVar("Kind", bound="Options")
Flags = argparse._ActionsContainer  # a parser, or a group of one
# By name, such as "qkv-fusion"; a mode of torch.compile stands for True.
Switches = Mapping[str, bool | str]

FORMATS = ("bfloat16", "float16")
# What --sort-by takes: torch.profiler's names; `cuda_` is today's `device_`.
SORT_KEYS = (
    "cpu_time_total",
    "self_cpu_time_total",
    "cuda_time_total",
    "self_cuda_time_total",
    "device_time_total",
    "self_device_time_total",
    "cpu_memory_usage",
    "cuda_memory_usage",
    "device_memory_usage",
    "count",
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
# Switches that fuse nothing, so `all-fusion` leaves them as they are.
ALONE = ("fa4", "fp8", "fp32-residual-gradient", "bf16-moments")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a version's functions read; a study adds fields for its own flags, or has
    these alone. A flag with the name of a field says what it means.
    """

    preset: str
    config: Path | None
    model: ModelConfig
    batch_size: int
    seq_len: int
    learning_rate: float
    seed: int
    device: str
    use_amp: bool
    amp_dtype: str | None
    deterministic: bool
    capture_step: bool | None  # None: as the version does by default
    checkpoint_activations: str
    switches: Switches = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of a training run.

    The last three have no flags. A program that runs a version with a part replaced sets them with
    `dataclasses.replace`.
    """

    num_steps: int
    lr_schedule: str
    lr_warmup_steps: int
    lr_decay_steps: int | None
    warmup_steps: int
    data: str
    eval_steps: int
    allow_tf32: bool
    log_every: int
    metrics_out: Path | None
    save_model: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int | None
    resume: bool
    parallel: str | None  # None: the version's first form, or one process
    distributed_timeout: int
    enable_pytorch_profiler: bool
    profile_dir: Path
    profile_steps: int
    profile_memory: bool
    profile_operators: bool
    sort_by: str | None
    memory_snapshot: Path | None
    profile_attention_only: bool
    profile_with_stack: bool
    profile_with_flops: bool
    enable_deepspeed_flops: bool
    flops_dir: Path
    enable_all_profiling: bool
    measure_peak: bool
    time_phases: bool
    validate_setup: bool
    name: str | None = None  # of the run in its record; None: the version's
    check_gradients: bool = True  # whether every parameter must get one before the first step
    phase_clock: type | None = None  # of --time-phases; None: `common.timing.Clock`


# ------------------------------------------------------------------------------------------- flags


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


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--preset, --config, and the sizes of a model."""
    add = parser.add_argument_group("model").add_argument
    add("--preset", default="tiny", choices=PRESETS, help="named sizes (default: %(default)s)")
    add(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        help="its sections `model:` and `training:` override the preset",
    )
    # `dest` is the name in a configuration file.
    add("--hidden-dim", dest="hidden_size", type=positive, metavar="D", help="hidden size")
    add("--num-layers", type=positive, metavar="L", help="num layers")
    add(
        "--num-heads",
        dest="num_attention_heads",
        type=positive,
        metavar="H",
        help="num attention heads",
    )
    add(
        "--num-kv-heads",
        dest="num_key_value_heads",
        type=positive,
        metavar="K",
        help="key/value heads; fewer than H: grouped-query attention (default: H)",
    )
    add(
        "--intermediate-dim",
        dest="intermediate_size",
        type=positive,
        metavar="F",
        help="intermediate size",
    )
    add("--vocab-size", type=positive, metavar="V", help="vocab size")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add(
        "--batch-size",
        type=positive,
        metavar="B",
        help="sequences in a step (default: 8, or the preset's)",
    )
    add(
        "--seq-len",
        type=positive,
        metavar="S",
        help="tokens in a sequence (default: 128, or the preset's)",
    )
    add(
        "--learning-rate",
        type=float,
        help="learning rate of AdamW (default: the preset's; tiny: 1.5e-3)",
    )
    add("--seed", type=int, help="seed of weights and data (default: 0)")
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="cuda also means AMD's ROCm (default: %(default)s)",
    )
    add("--use-amp", action="store_true", help="mixed precision by autocast")
    add("--amp-dtype", choices=FORMATS, help="number format of --use-amp (default: bfloat16)")
    add(
        "--deterministic",
        action=BooleanOptionalAction,
        default=False,
        help="the same bits for the same seed on one device, with the kernels that allow it",
    )
    add(
        "--capture-step",
        action=BooleanOptionalAction,
        help="run the whole step as one CUDA or HIP graph (GPU only; Version 4 does so by default)",
    )
    add(
        "--checkpoint-activations",
        default="none",
        choices=("none", "block", "selective"),
        help="compute a block's activations again in the backward pass: "
        "all, or all but matrix products and fused attention (default: %(default)s)",
    )
    add("--num-steps", type=positive, help="optimizer steps (default: 300)")
    add(
        "--lr-schedule",
        default="constant",
        choices=("constant", "cosine"),
        help="of the learning rate (default: %(default)s)",
    )
    add(
        "--lr-warmup-steps",
        type=int,
        default=0,
        metavar="N",
        help="steps in which the learning rate rises to its full value (default: %(default)s)",
    )
    add(
        "--lr-decay-steps",
        type=positive,
        metavar="N",
        help="the step at which a cosine has reached 0 (default: --num-steps)",
    )
    add(
        "--warmup-steps",
        type=positive,
        default=3,
        metavar="N",
        help="passes before the first step, neither timed nor trained on (default: %(default)s)",
    )
    add(
        "--data",
        default="stdlib",
        metavar="stdlib|synthetic|FILE",
        help="text to train on (default: the Python standard library's source)",
    )
    add(
        "--eval-steps",
        type=int,
        default=0,
        metavar="N",
        help="batches to evaluate at the end, of the last 1/20 of the text, "
        "which training then does not see (default: %(default)s)",
    )
    add(
        "--allow-tf32",
        action="store_true",
        help="let fp32 matrix products round to TF32 (on an MI300 to XF32)",
    )
    add(
        "--log-every",
        type=positive,
        default=20,
        metavar="N",
        help="steps between lines (default: %(default)s)",
    )
    add(
        "--metrics-out",
        type=Path,
        metavar="FILE",
        help="file for the record (default: metrics_<version>.json)",
    )
    add("--save-model", type=Path, metavar="DIR", help="save a checkpoint that transformers opens")
    add(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="save all that the next step needs at the end of the run, in DIR/step-N",
    )
    add(
        "--checkpoint-every",
        type=positive,
        metavar="N",
        help="save also every N steps, but none that is profiled; the two newest are kept",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --checkpoint-dir, or start if there is none",
    )

    job = "torchrun --standalone --nproc-per-node N SCRIPT ...; --batch-size is of each"
    add = parser.add_argument_group(f"several processes ({job})").add_argument
    add(
        "--parallel",
        choices=ranks.FORMS,
        help="DistributedDataParallel, the same with a sharded optimizer, or fully_shard "
        "(default under torchrun: ddp)",
    )
    add(
        "--distributed-timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="how long a process waits for the others before the job fails (default: %(default)s)",
    )


def add_profiling_flags(parser: argparse.ArgumentParser) -> None:
    title = "profiling (each --profile-... and --sort-by turns the profiler on)"
    add = parser.add_argument_group(title).add_argument
    add("--enable-pytorch-profiler", action="store_true", help="profile the last steps of the run")
    add(
        "--profile-dir",
        type=Path,
        metavar="DIR",
        help="folder for profiles (default: pytorch_profiles)",
    )
    add(
        "--profile-steps",
        type=positive,
        metavar="N",
        help="steps to profile, fewer if --num-steps is short (default: 3)",
    )
    add(
        "--profile-memory",
        "--enable-memory-profiling",
        action="store_true",
        help="record every allocation, for memory over time",
    )
    add("--profile-operators", action="store_true", help="print the table of operators")
    add(
        "--sort-by",
        choices=SORT_KEYS,
        metavar="KEY",
        help=f"order of that table: {', '.join(SORT_KEYS)} (default: self time)",
    )
    add(
        "--memory-snapshot",
        type=Path,
        metavar="FILE",
        help="every allocation of one step: FILE.pickle for pytorch.org/memory_viz, FILE.json "
        "(GPU only)",
    )
    add(
        "--profile-attention-only",
        action="store_true",
        help="keep only what runs inside the attention span, forward and backward",
    )
    add(
        "--profile-with-stack",
        action="store_true",
        help="put Python's calls into the trace (slower steps, a larger trace)",
    )
    add(
        "--profile-with-flops",
        action="store_true",
        help="add torch.profiler's FLOPs, which it counts for few operators",
    )
    add(
        "--enable-deepspeed-flops",
        action="store_true",
        help="count FLOPs by formula, FlopCounterMode and DeepSpeed",
    )
    add(
        "--flops-dir",
        type=Path,
        metavar="DIR",
        help="where these counts go, and count (default: flops_analysis)",
    )
    add(
        "--enable-all-profiling",
        action="store_true",
        help="profiler, memory, operator table, FLOPs",
    )
    add(
        "--measure-peak",
        action="store_true",
        help="time a large GEMM and a copy first, on a GPU for 10 s; gives the %% of measured GEMM",
    )
    add(
        "--time-phases",
        action="store_true",
        help="after the run, time forward, backward and optimizer apart in steps of their own",
    )
    add(
        "--validate-setup",
        action="store_true",
        help="check the installation and every output, line by line",
    )


def run_flags() -> argparse.ArgumentParser:
    """All flags of a run but a version's switches."""
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_training_flags(parser)
    add_profiling_flags(parser)
    return parser


def add(group: Flags, *flags: str) -> None:
    """Adds some of a run's flags, such as "--device"."""
    actions = run_flags()._option_string_actions
    for flag in flags:
        group._add_action(actions[flag])


def add_output_dir(group: Flags, default: str) -> None:
    group.add_argument(
        "--output-dir", type=Path, default=Path(default), metavar="DIR", help=f"default: {default}"
    )


def add_switches(parser: argparse.ArgumentParser, switches: Mapping[str, bool]) -> None:
    """`--enable-X` and `--disable-X` for each switch of a version, and for `all-fusion`."""
    on = [name for name, value in switches.items() if value]
    group = parser.add_argument_group(f"switches (on unless switched off: {', '.join(on)})")
    for name in (*switches, "all-fusion"):
        choice = group.add_mutually_exclusive_group()
        key = name.replace("-", "_")
        choice.add_argument(f"--enable-{name}", dest=key, action="store_true", default=None)
        choice.add_argument(f"--disable-{name}", dest=key, action="store_false", default=None)
    if "torch-compile" in switches:
        group.add_argument(
            "--torch-compile-mode",
            choices=COMPILE_MODES,
            help="mode of torch.compile (default: default)",
        )


# -------------------------------------------------------------------------- from flags to options


def switches(arguments: argparse.Namespace, defaults: Mapping[str, bool]) -> dict[str, bool | str]:
    """Which switches of a version are on: its defaults, or all or none that fuse (`all-fusion`),
    then those that are named.

    A mode of torch.compile stands in place of True; UsageError if it is off.
    PYTORCH_FALLBACK_ATTENTION=1 in the environment keeps flash attention off.
    """
    flags = vars(arguments)
    result: dict[str, bool | str] = {}
    for name, default in defaults.items():
        value = flags.get(name.replace("-", "_"))
        if value is None and name not in ALONE:
            value = flags.get("all_fusion")
        result[name] = default if value is None else value
    if "flash-attention" in defaults and os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1":
        result["flash-attention"] = False
    mode = flags.get("torch_compile_mode")
    if mode and not result["torch-compile"]:
        raise UsageError("--torch-compile-mode needs --enable-torch-compile")
    if mode:
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
    values: dict[str, Any] = vars(run_flags().parse_args([])) | vars(arguments)
    values["sequence_length"] = values["seq_len"]
    config = configs.resolve(
        values["preset"],
        values["config"],
        model={name: values.get(name) for name in ModelConfig.model_fields},
        training={name: values[name] for name in TrainingConfig.model_fields},
    )
    values |= config.training.model_dump()
    values |= {"model": config.model, "seq_len": config.training.sequence_length}
    values["switches"] = switches(arguments, defaults or {})
    if values["amp_dtype"] and not values["use_amp"]:
        raise UsageError("--amp-dtype has no effect without --use-amp")
    values |= _implied(values)
    names = [option.name for option in fields(kind) if option.name in values]
    options = kind(**{name: values[name] for name in names})
    if isinstance(options, RunOptions):
        _refuse_contradictions(options)
    return options


def _implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """What flags of profiling imply: each turns on what it needs."""
    everything = values["enable_all_profiling"]
    sort_by = values["sort_by"]
    profiled = any(value for name, value in values.items() if name.startswith("profile_"))
    return {
        "enable_pytorch_profiler": bool(
            values["enable_pytorch_profiler"] or everything or profiled or sort_by
        ),
        "profile_dir": values["profile_dir"] or Path("pytorch_profiles"),
        "profile_steps": values["profile_steps"] or 3,
        "profile_memory": values["profile_memory"] or everything,
        "profile_operators": bool(values["profile_operators"] or everything or sort_by),
        "enable_deepspeed_flops": bool(
            values["enable_deepspeed_flops"] or everything or values["flops_dir"]
        ),
        "flops_dir": values["flops_dir"] or Path("flops_analysis"),
    }


def _refuse_contradictions(options: RunOptions) -> None:
    """UsageError: a value contradicts another, or has no effect."""
    if options.parallel and not ranks.here().launched:
        job = "torchrun --standalone --nproc-per-node 2 SCRIPT --parallel ..."
        raise UsageError(f"--parallel {options.parallel} needs torchrun: {job}")
    if (options.resume or options.checkpoint_every) and not options.checkpoint_dir:
        raise UsageError("--resume and --checkpoint-every need a folder: add --checkpoint-dir")
    if options.lr_decay_steps and options.lr_schedule == "constant":
        raise UsageError(
            "--lr-decay-steps has no effect with a constant learning rate: add --lr-schedule cosine"
        )
    scheduled = options.lr_decay_steps or options.num_steps
    if not 0 <= options.lr_warmup_steps < scheduled:
        limit = f"less than the steps of the schedule ({scheduled})"
        raise UsageError(f"--lr-warmup-steps must be 0 or more, and {limit}")
    if options.eval_steps < 0:
        raise UsageError(f"--eval-steps must be 0 or more, not {options.eval_steps}")
    if options.time_phases and options.capture_step:
        raise UsageError(
            "--time-phases needs the host between the phases, which --capture-step removes: "
            "leave one of them out"
        )
    if options.profile_with_flops and options.profile_attention_only:
        raise UsageError(
            "--profile-with-flops counts the whole step: leave --profile-attention-only out"
        )
    if options.sort_by and "memory" in options.sort_by and not options.profile_memory:
        raise UsageError(
            f"--sort-by {options.sort_by} needs the memory to be recorded: add --profile-memory"
        )
