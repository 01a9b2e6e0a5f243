"""Version files as modules, for scripts that compare several, and the flags that such scripts share.

A comparison needs the model, a shape, a device and a number format, but no data set and no training run. So such a
script has only these flags of `common.cli`, with the same names and meanings, and can pass on those that a version adds.
"""

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common import cli
from common import config as configs
from common.errors import UsageError

import torch
from torch import Tensor

REQUIRED = ("TinyLlama", "make_model", "make_optimizer", "make_step")


def load(path: Path) -> ModuleType:
    """Imports a version file as a module of its own: a change to it leaves an earlier import of the same file as it is.

    Raises:
        UsageError: the file is missing, is not Python, or is not a version.
    """
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file: give a version, such as ../version1_pytorch_baseline/tiny_llama_v1.py")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UsageError(f"{path} cannot be imported: {error}") from error
    missing = [required for required in REQUIRED if not hasattr(module, required)]
    if missing:
        raise UsageError(f"{path} is not a version: it has no {', '.join(missing)} (see common/training/run.py)")
    return module


def parser(description: str | None, *, batch_size: bool = True, sequence_length: bool = True, capture: bool = True) -> cli.Parser:
    """The flags of a comparison; `resolve` turns them into a configuration.

    Args:
        batch_size, sequence_length, capture: whether to have the flag; a script that goes through several values has its own.
    """
    result = cli.Parser(description)
    cli.add_preset(result)
    if batch_size:
        cli.add_batch_size(result)
    if sequence_length:
        cli.add_sequence_length(result)
    cli.add_seed(result)
    cli.add_device(result)
    cli.add_precision(result)
    if capture:
        cli.add_capture(result)
    return result


def resolve(arguments: Namespace) -> Namespace:
    """Fills in what was left out, from preset and file, and adds `model`, a ModelConfig, and `learning_rate`.

    Raises:
        UsageError: a value is wrong, or contradicts another.
    """
    batch_size, length = getattr(arguments, "batch_size", None), getattr(arguments, "seq_len", None)  # `parser` can lack them
    training = dict(batch_size=batch_size, sequence_length=length, seed=arguments.seed)
    config = configs.resolve(arguments.preset, arguments.config, model={}, training=training)
    arguments.model, arguments.learning_rate = config.model, config.training.learning_rate
    arguments.batch_size, arguments.seq_len = config.training.batch_size, config.training.sequence_length
    arguments.seed = config.training.seed
    return arguments


def switched(version: ModuleType, options: Namespace, *flags: str) -> Namespace:
    """The options with the version's own flags: as given, and otherwise at their defaults.

    Raises:
        UsageError: the version has no such flag, or the flags contradict each other.
    """
    own = cli.Parser(None)
    if hasattr(version, "SWITCHES"):
        cli.add_switches(own, version.SWITCHES)
    if hasattr(version, "add_arguments"):
        version.add_arguments(own)
    chosen, unknown = own.parse_known_args(flags)
    if unknown:
        raise UsageError(
            f"this script takes no {unknown[0]}: it takes its own flags (--help) and the switches that only "
            f"{Path(version.__file__).name} has"
        )
    result = Namespace(**vars(options) | vars(chosen))
    cli.switches(result, getattr(version, "SWITCHES", {}))  # refuses what contradicts itself before any work
    return result


def random_batch(options: Namespace, device: torch.device, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] drawn uniformly, the same for the same seed on every device, and the ids that follow each, [B, S].

    Of several processes, each gets its part of a batch of world_size x B sequences, in the order of the ranks.
    """
    generator = torch.Generator().manual_seed(options.seed)
    shape = (world_size, options.batch_size, options.seq_len + 1)
    ids = torch.randint(options.model.vocab_size, shape, generator=generator)[rank].to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
