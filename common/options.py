"""The options of a training run or a comparison: resolved once from preset, file and flags, and never changed afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.config import ModelConfig
from common.timing import Clock

Switches = Mapping[str, bool | str]  # by name, such as "qkv-fusion"; a mode of torch.compile stands for True


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a version's functions read; a study adds fields for its own flags, or has these alone.

    Attributes:
        capture_step: None leaves it to the version.
        switches: how the version's switches stand.
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
    capture_step: bool | None = None
    switches: Switches = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of a training run; `cli.parser` explains its flags.

    The last three have no flags. A program that runs a version with a part replaced sets them with `dataclasses.replace`.

    Attributes:
        parallel: of `ranks.FORMS`; None leaves it to the version.
        name: of the run in its record; None: the version's.
        check_gradients: whether every parameter must get a gradient before the first step.
        phase_clock: the clock of --time-phases.
    """

    num_steps: int
    warmup_steps: int
    data: str
    allow_tf32: bool
    log_every: int
    metrics_out: Path | None
    save_model: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int | None
    resume: bool
    parallel: str | None
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
    name: str | None = None
    check_gradients: bool = True
    phase_clock: type[Clock] = Clock
