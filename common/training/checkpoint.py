"""Saving a trained model, for others to open (`--save-model`) or for the run to go on
(`--checkpoint-dir`).

`save` writes what `transformers.AutoModelForCausalLM` and `AutoTokenizer` open. `Checkpoints`
writes a folder such as `step-00000100` with all that the next steps depend on. PyTorch's
distributed checkpoint stores weights and the optimizer's state as safetensors, each under its
parameter's name, whichever process holds it. So any number of processes, in any form of --parallel,
can go on from it. The position in the data and the loss scale are JSON. Neither can hold code.
Tensors are read into the memory that a captured step uses. Random numbers that a step draws follow
from its number alone.

A folder is written under a hidden name and renamed when it is whole: a process that is killed
leaves the checkpoint before it. A CRC-32 of each file stands in position.json, so a run goes on
from the newest checkpoint that holds what was written. Reading a file for it takes about 0.7 s a
GB.
"""

import json
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from common import ranks, saved_config, schedule, weights
from common.config import ModelConfig
from common.data import Dataset
from common.options import RunOptions
from common.precision import Precision
from common.training import preparation
from common.training.preparation import CommunicatingOptimizer, Prepared, States
from tracepage import files
from tracepage.errors import RunError, UsageError, first_line
from tracepage.files import PositiveAmount, writable_folder, write_json

import torch
from pydantic import NonNegativeInt, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import TypedDict

KEPT = 2  # newest checkpoints
NAME = "step-" + 8 * "[0-9]"  # of a checkpoint's folder
BUILDING = ".writing"
POSITION = "position.json"
MOMENTS = "format of moments"  # fp32 in older checkpoints, which do not name it


def whole_model(prepared: Prepared) -> dict[str, Tensor]:
    """The weights under Version 1's names, each gathered; all processes must call it."""
    _complete_weights(prepared.optimizer)
    state = weights.baseline_state_dict(prepared.model)
    return {
        name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        for name, weight in state.items()
    }


def save(folder: Path, state: dict[str, Tensor], config: ModelConfig, dataset: Dataset) -> None:
    """Writes model.safetensors, config.json and, for data that has one, the tokenizer. RunError:
    that cannot be done.

    `state` has Version 1's names, of which the tied `lm_head.weight` is left out, as transformers
    does.
    """
    tensors = {
        f"model.{name}": value.detach().cpu().contiguous()
        for name, value in state.items()
        if name != "lm_head.weight"
    }
    with _failure_explained(f"cannot write {folder / 'model.safetensors'}"):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llama = {
        "architectures": ["LlamaForCausalLM"],
        **saved_config.content(config),
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", llama)
    # Safetensors lets only the owner read its file.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    if dataset.tokenizer:
        shutil.copy(dataset.tokenizer, folder / "tokenizer.json")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / "tokenizer_config.json", settings)


# ------------------------------------------------------------------------------------ to go on from


class Scaler(TypedDict, total=False):
    """The state of `torch.amp.GradScaler`; empty where there is none."""

    scale: PositiveAmount
    growth_factor: PositiveAmount
    backoff_factor: PositiveAmount
    growth_interval: PositiveInt
    _growth_tracker: NonNegativeInt


class Position(TypedDict):
    """The content of position.json, which stands beside the tensors."""

    schema: Literal["tiny-llama-checkpoint/2"]
    step: PositiveInt  # the last one that was finished
    inputs: dict[str, Any]  # what the losses depend on; a run that goes on has the same
    scaler: Scaler  # of float16's loss
    sums: dict[str, int]  # CRC-32 of each file by its name, of position.json without this key


def inputs(options: RunOptions, precision: Precision, dataset: Dataset) -> dict[str, Any]:
    """The inputs beside the checkpoint that fix the next losses, by the names in a message. The
    learning rate may change.
    """
    return {
        "version": options.name,
        **options.model.model_dump(),
        "sequences in a step of all processes": ranks.here().world_size * options.batch_size,
        "sequence length": options.seq_len,
        "seed": options.seed,
        "learning rate schedule": schedule.described(options),
        "products in FP8": options.switches.get("fp8", False),
        MOMENTS: "bf16" if options.switches.get("bf16-moments") else "fp32",
        "data sha256": dataset.sha256,
        "precision": precision.name,
        "TF32": options.allow_tf32,
    }


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return sorted(folder.glob(NAME))


def _file_sum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**24), b""):
            total = zlib.crc32(block, total)
    return total


def _sums(folder: Path, position: Position) -> dict[str, int]:
    sums = {path.name: _file_sum(path) for path in folder.glob("*.safetensors")}
    content = {key: value for key, value in position.items() if key != "sums"}
    return sums | {POSITION: zlib.crc32(json.dumps(content, sort_keys=True).encode())}


def check(source: Path) -> UsageError | RunError | None:
    """Why a run cannot go on from a checkpoint; None if it holds what was written."""
    try:
        position = files.read(source / POSITION, Position)
        with _failure_explained(f"cannot read {source}"):
            sums = _sums(source, position)
    except (UsageError, RunError) as error:
        return error
    if sums != position["sums"]:
        return RunError(f"cannot read {source}: its content is not what was written")
    return None


class Checkpoints:
    """The checkpoints of a run; `steps_before` steps were finished before it, 0 for a new one."""

    def __init__(self, options: RunOptions, precision: Precision, dataset: Dataset) -> None:
        """Finds the newest one for --resume.

        UsageError: the folder cannot be written to, or holds a checkpoint without --resume; or the
        checkpoint is of a run with other inputs, or of the last step.
        """
        assert options.checkpoint_dir
        self.folder = writable_folder(options.checkpoint_dir, "--checkpoint-dir")
        self.precision = precision
        self.inputs = inputs(options, precision, dataset)
        self.damaged: set[Path] = set()
        self.stuck: set[Path] = set()  # Old ones that could not be removed.
        self.steps_before = 0
        self.scaler: Scaler = {}
        existing = checkpoints(self.folder)
        if existing and not options.resume:
            raise UsageError(
                f"--checkpoint-dir: {existing[-1]} is there: go on from it with --resume, "
                "or name another folder",
                shared=True,
            )
        self.source = self._newest_whole(existing)
        if self.source:
            self._read_position(self.source, options.num_steps)
            print(f"going on from {self.source}")
        elif options.resume:
            print(f"no checkpoint in {self.folder} yet: starting from the first step")

    def _newest_whole(self, existing: list[Path]) -> Path | None:
        """The checkpoint to go on from, as the first process finds it. The error of the newest is
        raised if all are damaged.
        """
        source = None
        problems: dict[Path, UsageError | RunError] = {}
        if ranks.here().main_process:
            for source in reversed(existing):
                problem = check(source)
                if not problem:
                    break
                problems[source] = problem
        source, problems = ranks.gathered((source, problems))[0]
        if source and source in problems:
            newest = problems[existing[-1]]
            raise type(newest)(str(newest), shared=True)
        for problem in problems.values():
            print(f"left out, as it is damaged: {problem}")
        self.damaged = {*problems}
        return source

    def _read_position(self, source: Path, num_steps: int) -> None:
        position = files.read(source / POSITION, Position)
        before = {MOMENTS: "fp32"} | position["inputs"]
        differing = [
            f"{name} ({before.get(name)}, now {value})"
            for name, value in self.inputs.items()
            if before.get(name) != value
        ]
        if differing:
            raise UsageError(
                f"--resume: {source} is of a run with another {', '.join(differing)}; "
                "give the same",
                shared=True,
            )
        if position["step"] >= num_steps:
            raise UsageError(
                f"--resume: {source} leaves nothing to train: raise --num-steps (now {num_steps})",
                shared=True,
            )
        self.steps_before = position["step"]
        self.scaler = position["scaler"]

    def load(self, prepared: Prepared) -> None:
        """Takes what is to be saved, and reads it from the checkpoint to go on from, if any.
        RunError: it cannot be read.
        """
        self.prepared = prepared
        if not self.source:
            return
        with _failure_explained(f"cannot read {self.source}"):
            states = whole_states(prepared.optimizer)
            reader = dcp.HuggingFaceStorageReader(str(self.source))
            dcp.load(_tensors(prepared, states), storage_reader=reader, no_dist=not ranks.joined())
        if isinstance(prepared.optimizer, CommunicatingOptimizer):
            prepared.optimizer.take_states(states)
        # What a model or optimizer derives from the weights follows.
        prepared.model.load_state_dict(prepared.model.state_dict())
        if self.scaler:
            self.precision.scaler.load_state_dict(cast(dict[str, Any], self.scaler))

    def save(self, finished: int) -> None:
        """Writes the state after these steps, and removes all but the KEPT newest checkpoints.
        RunError: it cannot be written.
        """
        main = ranks.here().main_process
        target = self.folder / f"step-{finished:08d}"
        building = self.folder / BUILDING
        with _failure_explained(f"cannot write {target}"):
            if main:
                shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
                building.mkdir()
            ranks.wait_for_all()
            _complete_weights(self.prepared.optimizer)
            state = _tensors(self.prepared, whole_states(self.prepared.optimizer))
            writer = dcp.HuggingFaceStorageWriter(str(building), save_distributed=True)
            dcp.save(state, storage_writer=writer, no_dist=not ranks.joined())
            if main:
                position: Position = {
                    "schema": "tiny-llama-checkpoint/2",
                    "step": finished,
                    "inputs": self.inputs,
                    "scaler": cast(Scaler, self.precision.scaler.state_dict()),
                    "sums": {},
                }
                position["sums"] = _sums(building, position)
                write_json(building / POSITION, position)
                if target in self.damaged:
                    shutil.rmtree(target)
                    self.damaged.remove(target)
                building.rename(target)
                self._remove_old()
        ranks.wait_for_all()
        print(f"saved {target}", flush=True)

    def _remove_old(self) -> None:
        """Removes all but the KEPT newest checkpoints. Damaged ones do not count, and stay."""
        left_alone = self.damaged | self.stuck
        whole = [path for path in checkpoints(self.folder) if path not in left_alone]
        for old in whole[:-KEPT]:
            try:
                shutil.rmtree(old)
            except OSError as error:
                self.stuck.add(old)
                print(f"note: {old} cannot be removed: {error.strerror}", flush=True)


def _complete_weights(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, CommunicatingOptimizer):
        optimizer.gather_weights()


def whole_states(optimizer: torch.optim.Optimizer) -> States:
    """The state of each parameter, with tensors that are whole or know their place in the whole;
    all processes must call it.
    """
    if isinstance(optimizer, CommunicatingOptimizer):
        return optimizer.whole_states()
    return preparation.states(optimizer)


def _tensors(prepared: Prepared, states: States) -> dict[str, Tensor]:
    """By name: the weights and the optimizer's states, not copied. One that several parameters
    share has the first's name.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in prepared.model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        tensors |= {f"{key}.{name}": value for key, value in states.get(parameter, {}).items()}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


@contextmanager
def _failure_explained(failure: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # PyTorch warns so in every run of one process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except (CheckpointException, SafetensorError, OSError) as error:
        reason: BaseException = error
        if isinstance(error, CheckpointException):
            reason = next(iter(error.failures.values()))[0]
        raise RunError(f"{failure}: {first_line(reason, type(reason).__name__)}") from error
