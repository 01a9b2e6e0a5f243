"""The options of a run or a comparison: resolved once from preset, file and flags, and never
changed afterwards.

A field with `flag` is a flag of the command line: `common.cli` takes its name, its type and its
help from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ranks
from common.config import PRESETS, ModelConfig

# by name, such as "qkv-fusion"; a mode of torch.compile stands for True
Switches = Mapping[str, bool | str]

# groups of flags
MODEL = "model"
TRAINING = "training"
PROCESSES = "several processes (torchrun --standalone --nproc-per-node N SCRIPT ...; --batch-size is of each)"
PROFILING = "profiling (each --profile-... and --sort-by turns the profiler on)"
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


def flag(group: str, shown: str, default: object = None, **taken: Any) -> Any:
    """A field that is a flag. Where None is its default, `cli` or preset and file fill it in;
    `taken` goes to add_argument.
    """
    return field(metadata={"group": group, "help": shown, "default": default, **taken})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a version's functions read; a study adds fields for its own flags, or has
    these alone.
    """

    preset: str = flag(MODEL, "named sizes", "tiny", choices=PRESETS)
    config: Path | None = flag(
        MODEL, "its sections `model:` and `training:` override the preset", metavar="FILE.yaml"
    )
    model: ModelConfig
    batch_size: int = flag(
        TRAINING, "sequences in a step (default: 8, or the preset's)", metavar="B"
    )
    seq_len: int = flag(
        TRAINING, "tokens in a sequence (default: 128, or the preset's)", metavar="S"
    )
    learning_rate: float = flag(
        TRAINING, "learning rate of AdamW (default: the preset's; tiny: 1.5e-3)"
    )
    seed: int = flag(TRAINING, "seed of weights and data (default: 0)", type=int)
    device: str = flag(
        TRAINING, "cuda also means AMD's ROCm", "auto", choices=("auto", "cpu", "cuda")
    )
    use_amp: bool = flag(TRAINING, "mixed precision by autocast")
    amp_dtype: str | None = flag(
        TRAINING, "number format of --use-amp (default: bfloat16)", choices=("bfloat16", "float16")
    )
    capture_step: bool | None = flag(
        TRAINING,
        "run the whole step as one CUDA or HIP graph (GPU only; Version 4 does so by default)",
    )
    checkpoint_activations: str = flag(
        TRAINING,
        "compute a block's activations again in the backward pass: all, or all but matrix products and fused attention",
        "none",
        choices=("none", "block", "selective"),
    )
    switches: Switches = field(default_factory=dict)  # how the version's stand


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of a training run.

    The last three have no flags. A program that runs a version with a part replaced sets them with
    `dataclasses.replace`.
    """

    num_steps: int = flag(TRAINING, "optimizer steps (default: 300)")
    lr_schedule: str = flag(
        TRAINING, "of the learning rate", "constant", choices=("constant", "cosine")
    )
    lr_warmup_steps: int = flag(
        TRAINING,
        "steps in which the learning rate rises to its full value",
        0,
        metavar="N",
        type=int,
    )
    lr_decay_steps: int | None = flag(
        TRAINING, "the step at which a cosine has reached 0 (default: --num-steps)", metavar="N"
    )
    warmup_steps: int = flag(
        TRAINING, "passes before the first step, neither timed nor trained on", 3, metavar="N"
    )
    data: str = flag(
        TRAINING,
        "text to train on (default: the Python standard library's source)",
        "stdlib",
        metavar="stdlib|synthetic|FILE",
    )
    eval_steps: int = flag(
        TRAINING,
        "batches to evaluate at the end, of the last 1/20 of the text, which training then does not see",
        0,
        metavar="N",
        type=int,
    )
    allow_tf32: bool = flag(
        TRAINING, "let fp32 matrix products round to TF32 (on an MI300 to XF32)"
    )
    log_every: int = flag(TRAINING, "steps between lines", 20, metavar="N")
    metrics_out: Path | None = flag(
        TRAINING, "file for the record (default: metrics_<version>.json)", metavar="FILE"
    )
    save_model: Path | None = flag(
        TRAINING, "save a checkpoint that transformers opens", metavar="DIR"
    )
    checkpoint_dir: Path | None = flag(
        TRAINING,
        "save all that the next step needs at the end of the run, in DIR/step-N",
        metavar="DIR",
    )
    checkpoint_every: int | None = flag(
        TRAINING,
        "save also every N steps, but none that is profiled; the two newest are kept",
        metavar="N",
    )
    resume: bool = flag(
        TRAINING, "go on from the newest checkpoint in --checkpoint-dir, or start if there is none"
    )

    parallel: str | None = flag(  # None leaves it to the version
        PROCESSES,
        "DistributedDataParallel, the same with a sharded optimizer, or fully_shard (default under torchrun: ddp)",
        choices=ranks.FORMS,
    )
    distributed_timeout: int = flag(
        PROCESSES,
        "how long a process waits for the others before the job fails",
        600,
        metavar="SECONDS",
    )

    enable_pytorch_profiler: bool = flag(PROFILING, "profile the last steps of the run")
    profile_dir: Path = flag(
        PROFILING, "folder for profiles (default: pytorch_profiles)", metavar="DIR"
    )
    profile_steps: int = flag(
        PROFILING, "steps to profile, fewer if --num-steps is short (default: 3)", metavar="N"
    )
    profile_memory: bool = flag(
        PROFILING, "record every allocation, for memory over time", also="--enable-memory-profiling"
    )
    profile_operators: bool = flag(PROFILING, "print the table of operators")
    sort_by: str | None = flag(
        PROFILING,
        f"order of that table: {', '.join(SORT_KEYS)} (default: self time)",
        choices=SORT_KEYS,
        metavar="KEY",
    )
    memory_snapshot: Path | None = flag(
        PROFILING,
        "every allocation of one step: FILE.pickle for pytorch.org/memory_viz, FILE.json (GPU only)",
        metavar="FILE",
    )
    profile_attention_only: bool = flag(
        PROFILING, "keep only what runs inside the attention span, forward and backward"
    )
    profile_with_stack: bool = flag(
        PROFILING, "put Python's calls into the trace (slower steps, a larger trace)"
    )
    profile_with_flops: bool = flag(
        PROFILING, "add torch.profiler's FLOPs, which it counts for few operators"
    )
    enable_deepspeed_flops: bool = flag(
        PROFILING, "count FLOPs by formula, FlopCounterMode and DeepSpeed"
    )
    flops_dir: Path = flag(
        PROFILING, "where these counts go, and count (default: flops_analysis)", metavar="DIR"
    )
    enable_all_profiling: bool = flag(PROFILING, "profiler, memory, operator table, FLOPs")
    measure_peak: bool = flag(
        PROFILING, "time a large GEMM and a copy first; also gives the %% of measured GEMM"
    )
    time_phases: bool = flag(
        PROFILING, "after the run, time forward, backward and optimizer apart in steps of their own"
    )
    validate_setup: bool = flag(PROFILING, "check the installation and every output, line by line")
    name: str | None = None  # of the run in its record; None: the version's
    check_gradients: bool = True  # whether every parameter must get one before the first step
    phase_clock: type | None = None  # of --time-phases; None: `common.timing.Clock`
