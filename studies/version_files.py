"""Version files as modules, for scripts that run or compare them, and the flags that comparisons
share.

A version is a module with

    TinyLlama(config)                        the model
    make_model(options)                      the model that the options ask for
    make_optimizer(model, options)           AdamW
    make_step(model, optimizer, precision)   a function of a batch: one training step, which returns
                                             its loss
    train(options, make_model, make_step)    a run, as `common.training.run.Run` records it; other
                                             functions may be given

and, where it has any, `SWITCHES` ({name: whether it is on by default}), `CAPTURED` (whether a step
is captured unless the flags say otherwise) and `PARALLEL` (the forms of --parallel that it
supports, the default first; all unless given).

A comparison needs no data set and no training run, so its script has only some of the flags of
`common.options`.
"""

import importlib.util
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from common import cli
from common.options import Options, RunOptions
from tracepage.errors import UsageError

import torch
from torch import Tensor

SHARED = (
    "--preset",
    "--config",
    "--num-layers",
    "--batch-size",
    "--seq-len",
    "--seed",
    "--device",
    "--use-amp",
    "--amp-dtype",
    "--deterministic",
    "--capture-step",
)
REQUIRED = ("TinyLlama", "make_model", "make_optimizer", "make_step")


def load(path: Path) -> ModuleType:
    """Imports a version file as a module of its own, whatever was imported from it before.
    UsageError: it is no version.
    """
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file: give a version, such as tiny_llama_v1.py")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UsageError(f"{path} cannot be imported: {error}") from error
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        raise UsageError(
            f"{path} is not a version: it has no {', '.join(missing)} "
            "(see studies/version_files.py)"
        )
    return module


def run_parser(version: ModuleType, description: str | None, analyzed: str = "") -> ArgumentParser:
    """The flags of a version's run, for `run_options`.

    Args:
        analyzed: the files on which a program reports that profiles its runs; empty for others.
    """
    parser = ArgumentParser(description=description)
    cli.add_model_flags(parser)
    cli.add_training_flags(parser)
    cli.add_profiling_flags(parser)
    if hasattr(version, "SWITCHES"):
        cli.add_switches(parser, version.SWITCHES)
    if analyzed:
        shown = f"{analyzed} to show; runs nothing"
        parser.add_argument("--analyze-existing", type=Path, nargs="+", metavar="FILE", help=shown)
        parser.set_defaults(enable_pytorch_profiler=True)
    return parser


def run_options(version: ModuleType, arguments: Namespace) -> RunOptions:
    """The options of a version's training run; errors as in `cli.resolve`."""
    return cli.resolve(RunOptions, arguments, getattr(version, "SWITCHES", None))


def parser(description: str | None, *left_out: str) -> ArgumentParser:
    """The flags of a comparison, for `resolve`, but for those that a script leaves out."""
    comparison = ArgumentParser(description=description)
    cli.add(comparison, *(flag for flag in SHARED if flag not in left_out))
    return comparison


def resolve(arguments: Namespace) -> Options:
    """The options of a comparison from the flags of `parser`. One that adds flags calls
    `cli.resolve` with its own class.
    """
    return cli.resolve(Options, arguments)


def switched(version: ModuleType, options: cli.Kind, *flags: str) -> cli.Kind:
    """The options with the version's switches as given, or at their defaults. UsageError: a flag is
    unknown or contradicted.
    """
    parser = ArgumentParser()
    defaults = getattr(version, "SWITCHES", {})
    if defaults:
        cli.add_switches(parser, defaults)
    return replace(options, switches=cli.switches(cli.parse(parser, flags), defaults))


def random_batch(options: Options, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] drawn uniformly, the same for the same seed on every device, and the ids
    that follow each, [B, S].
    """
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.batch_size, options.seq_len + 1)
    ids = torch.randint(options.model.vocab_size, shape, generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
