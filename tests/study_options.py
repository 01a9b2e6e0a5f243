"""The options of a study as its script resolves them, for small measurements on a CPU."""

from argparse import Namespace
from pathlib import Path

from common.config import ModelConfig
from common.options import Options
from studies import version_files

PEER = ModelConfig(  # no value is a default of transformers
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_sequence_length=16,
    rope_theta=500.0,
    rms_norm_eps=1e-3,
)


def resolved(config: Path | None, *flags: str) -> Options:
    """The options that comparisons share, on a CPU unless the flags say otherwise."""
    chosen = ["--config", str(config)] if config else []
    return version_files.resolve(
        version_files.parser(None).parse_args([*chosen, "--device", "cpu", *flags])
    )


def arguments(config: Path | None, **changes) -> Namespace:
    """The flags of a comparison, and those of a study as they are given."""
    flags = ["--device", "cpu", *(["--config", str(config)] if config else [])]
    return Namespace(**vars(version_files.parser(None).parse_args(flags)) | changes)


def benchmark(config: Path, **changes) -> Namespace:
    chosen = dict(
        models=["v1", "v2"],
        metrics=["throughput", "memory"],
        batch_sizes=[4, 2],
        seq_lengths=[8],
        num_steps=2,
        load_seconds=0.0,
        timed_seconds=0.0,
        trace_dir=None,
        repeats=2,
        timeout=900,
    )
    return arguments(config, **chosen | changes)
