"""Saving a trained model, for others to open (`--save-model`) or for the run to go on (`--checkpoint-dir`).

`save` writes what `transformers.AutoModelForCausalLM` and `AutoTokenizer` open. `Checkpoints` writes a folder such as
`step-00000100` with all that the next steps depend on: weights, the optimizer's state, the position in the data, the loss scale
and the states of the random number generators. PyTorch's distributed checkpoint stores each tensor under its parameter's name,
whichever process holds it, so any number of processes, in any form of --parallel, can go on from it. Tensors are read into the
memory that a captured step uses.

A folder is written under a hidden name and renamed when it is whole: a process that is killed leaves the checkpoint before it.
"""

import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from common import files, ranks
from common.config import ModelConfig
from common.data import Dataset
from common.errors import RunError, UsageError
from common.files import writable_folder, write_json
from common.options import RunOptions
from common.precision import Precision
from common.training import distributed
from common.training.step import Prepared

import torch
from pydantic import PositiveInt
from torch import Tensor
from typing_extensions import TypedDict

KEPT = 2  # newest checkpoints


def save(folder: Path, state: dict[str, Tensor], config: ModelConfig, dataset: Dataset) -> None:
    """Writes model.safetensors, config.json and, for data that has one, the tokenizer.

    Args:
        folder: exists.
        state: under Version 1's names; the tied `lm_head.weight` is left out, as transformers does.

    Raises:
        RunError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"model.{name}": value.detach().cpu().contiguous() for name, value in state.items() if name != "lm_head.weight"}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"cannot write {folder / 'model.safetensors'}: {error}") from error
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_sequence_length,
        "rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_std, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder / "config.json", llama)
    if dataset.tokenizer:
        shutil.copy(dataset.tokenizer, folder / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", settings)


# ---------------------------------------------------------------------------------------------------------- to go on from


class Position(TypedDict):
    """The content of position.json, which stands beside the tensors."""

    schema: Literal["tiny-llama-checkpoint/1"]
    step: PositiveInt  # the last one that was finished
    inputs: dict[str, Any]  # what the losses depend on; a run that goes on has the same
    scaler: dict[str, Any]  # of float16's loss; empty otherwise


def inputs(version: str, options: RunOptions, precision: Precision, dataset: Dataset) -> dict[str, Any]:
    """The inputs beside the checkpoint that fix the next losses, by the names in a message. The learning rate may change."""
    return {
        "version": version,
        **options.model.model_dump(),
        "sequences in a step of all processes": ranks.here().world_size * options.batch_size,
        "sequence length": options.seq_len, "seed": options.seed,
        "data sha256": dataset.sha256, "precision": precision.name,
    }  # fmt: skip


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    return sorted(folder.glob("step-*"))


def check_folder(folder: Path, resume: bool) -> None:
    """Raises UsageError where --checkpoint-dir cannot be used: before any work, and in the process that writes there."""
    if (found := complete(writable_folder(folder, "--checkpoint-dir"))) and not resume:
        raise UsageError(f"--checkpoint-dir: {found[-1]} is there: go on from it with --resume, or name another folder")


class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        first: steps that were finished before this run; 0 for a new one.
    """

    def __init__(self, options: RunOptions, inputs: dict[str, Any]) -> None:
        """Finds the newest checkpoint if --resume is given.

        Raises:
            UsageError: it is not one of such a run, or leaves nothing to train.
        """
        self.folder, self.every, self.inputs = options.checkpoint_dir or Path(), options.checkpoint_every, inputs
        self.on = options.checkpoint_dir is not None
        found = complete(self.folder) if options.resume else []
        self.source: Path | None = distributed.gathered(found[-1] if found else None)[0]
        self.position = Position(schema="tiny-llama-checkpoint/1", step=0, inputs={}, scaler={})
        if self.source:
            self.position = files.read(self.source / "position.json", Position)
            self._check(options.num_steps)
            print(f"going on from {self.source}")
        elif options.resume:
            print(f"no checkpoint in {self.folder} yet: starting from the first step")
        self.first = self.saved = self.position["step"]

    def _check(self, num_steps: int) -> None:
        saved = self.position["inputs"]
        differing = [
            f"{name} ({saved.get(name)}, now {value})" for name, value in self.inputs.items() if saved.get(name) != value
        ]
        if differing:
            raise UsageError(f"--resume: {self.source} is of a run with another {', '.join(differing)}; give the same")
        if self.position["step"] >= num_steps:
            raise UsageError(f"--resume: {self.source} leaves nothing to train: raise --num-steps (now {num_steps})")

    def load(self, prepared: Prepared, precision: Precision) -> None:
        """Takes what is to be saved, and reads it from the checkpoint that the run goes on from, if there is one.

        Raises:
            RunError: a file of it is missing or damaged.
        """
        self.prepared, self.precision = prepared, precision
        if not self.source:
            return
        from torch.distributed import checkpoint as dcp

        reader, rank = dcp.FileSystemReader(self.source), ranks.here().rank
        with _failure_explained(f"cannot read {self.source}"):
            saved = reader.read_metadata().state_dict_metadata
            saved_by = rank if f"random.cpu.{rank}" in saved else 0  # by fewer processes
            states = distributed.whole_states(prepared.optimizer)
            state = _tensors(prepared, states, saved_by)
            if f"random.gpu.{saved_by}" not in saved:  # by a run without a GPU
                state.pop(f"random.gpu.{saved_by}", None)
            dcp.load(state, storage_reader=reader, no_dist=not distributed.active())
        distributed.take_states(prepared.optimizer, states)
        prepared.model.load_state_dict(prepared.model.state_dict())  # what a model or optimizer derives from the weights
        if self.position["scaler"]:
            precision.scaler.load_state_dict(self.position["scaler"])
        torch.set_rng_state(state[f"random.cpu.{saved_by}"])
        if f"random.gpu.{saved_by}" in state:
            torch.cuda.set_rng_state(state[f"random.gpu.{saved_by}"])

    def due(self, finished: int, last: bool) -> bool:
        """Whether a checkpoint is to be written after this step: every --checkpoint-every steps, and when the run ends."""
        due = last or (self.every is not None and finished % self.every == 0)
        return self.on and due and finished > self.saved

    def save(self, finished: int) -> None:
        """Writes the state after this many steps, and removes all but the KEPT newest checkpoints.

        Raises:
            RunError: it cannot be written.
        """
        from torch.distributed import checkpoint as dcp

        target, main = self.folder / f"step-{finished:08d}", ranks.here().main_process
        building = self.folder / f".{target.name}"
        with _failure_explained(f"cannot write {target}"):
            if main:
                for left_over in self.folder.glob(".step-*"):  # by a process that was killed
                    shutil.rmtree(left_over)
                building.mkdir()
            distributed.wait_for_all()
            distributed.gather_weights(self.prepared.optimizer)
            states = distributed.whole_states(self.prepared.optimizer)
            state, writer = _tensors(self.prepared, states, ranks.here().rank), dcp.FileSystemWriter(building)
            dcp.save(state, storage_writer=writer, no_dist=not distributed.active())
            if main:
                scaler = self.precision.scaler.state_dict()
                position = Position(schema="tiny-llama-checkpoint/1", step=finished, inputs=self.inputs, scaler=scaler)
                write_json(building / "position.json", position)
                building.rename(target)
                for old in complete(self.folder)[:-KEPT]:
                    shutil.rmtree(old)
        distributed.wait_for_all()
        self.saved = finished
        print(f"saved {target}", flush=True)


def _tensors(prepared: Prepared, states: dict[Tensor, dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    """By name: the weights and the optimizer's states, not copied, and the states of the random number generators."""
    tensors = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors[f"random.gpu.{rank}"] = torch.cuda.get_rng_state()
    for name, parameter in prepared.model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        tensors |= {f"{key}.{name}": value for key, value in states.get(parameter, {}).items()}
    return tensors


@contextmanager
def _failure_explained(what: str) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it says so of every run in one process
            yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise RunError(f"{what}: {type(reason).__name__} {reason}".splitlines()[0]) from error
    except (OSError, EOFError, pickle.UnpicklingError) as error:  # the last two: of a damaged .metadata
        raise RunError(f"{what}: {error}") from error
