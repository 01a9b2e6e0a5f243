"""The options of a training run or a comparison: resolved once from preset, file and flags, and never changed afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config import ModelConfig
from common.timing import Clock

Switches = Mapping[str, bool | str]  # by name, such as "qkv-fusion"; a mode of torch.compile stands for True


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a version's functions read; a study adds fields for its own flags, or has these alone."""

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
    capture_step: bool | None = None  # None leaves it to the version
    switches: Switches = field(default_factory=dict)  # how the version's stand


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of a training run; `cli.parser` explains its flags.

    The last three have no flags. A program that runs a version with a part replaced sets them with `dataclasses.replace`.
    """

    num_steps: int
    warmup_steps: int
    lr_schedule: str
    lr_warmup_steps: int
    lr_decay_steps: int | None
    data: str
    allow_tf32: bool
    log_every: int
    metrics_out: Path | None
    save_model: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int | None
    resume: bool
    parallel: str | None  # of `ranks.FORMS`; None leaves it to the version
    distributed_timeout: int
    enable_pytorch_profiler: bool
    profile_dir: Path
    profile_steps: int
    profile_memory: bool
    profile_operators: bool
    profile_attention_only: bool
    profile_with_stack: bool
    profile_with_flops: bool
    sort_by: str | None
    enable_deepspeed_flops: bool
    flops_dir: Path
    measure_peak: bool
    time_phases: bool
    validate_setup: bool
    name: str | None = None  # of the run in its record; None: the version's
    check_gradients: bool = True  # whether every parameter must get one before the first step
    phase_clock: type[Clock] = Clock  # of --time-phases
