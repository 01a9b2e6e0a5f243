"""Saving a trained model, for others to open (`--save-model`) or for the run to go on (`--checkpoint-dir`).

`save` writes what `transformers.AutoModelForCausalLM` and `AutoTokenizer` open. `Checkpoints` writes a folder such as
`step-00000100` with all that the next steps depend on: weights, the optimizer's state, the position in the data, the loss scale
and the states of the random number generators. PyTorch's distributed checkpoint stores each tensor under its parameter's name,
whichever process holds it, so any number of processes, in any form of --parallel, can go on from it. Tensors are read into the
memory that a captured step uses.

A folder is written under a hidden name and renamed when it is whole: a process that is killed leaves the checkpoint before it.
Its file SHA256SUMS, which `sha256sum --check` reads, shows damage before anything else is read. It does not show who wrote the
files, so nothing in them may run code: the .metadata of PyTorch is a pickle, and may name only what such a file needs.
"""

import fcntl
import itertools
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from common import files, ranks, schedule
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

SAVED = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
KEPT = 2  # newest checkpoints
NAME = "step-" + 8 * "[0-9]"  # of a checkpoint's folder
SUMS, POSITION, METADATA = "SHA256SUMS", "position.json", ".metadata"

# The classes in a .metadata of PyTorch 2.11 to 2.15, beside dtypes. BytesStorageMetadata is none of them: PyTorch would unpickle
# what it describes.
PICKLED = {
    "torch": ("Size",), "torch.serialization": ("_get_layout",), "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip


def save(folder: Path, state: dict[str, Tensor], config: ModelConfig, dataset: Dataset) -> None:
    """Writes model.safetensors, config.json and, for data that has one, the tokenizer. RunError: that cannot be done.

    `state` has Version 1's names, of which the tied `lm_head.weight` is left out, as transformers does.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {f"model.{name}": value.detach().cpu().contiguous() for name, value in state.items() if name != "lm_head.weight"}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"cannot write {folder / 'model.safetensors'}: {error}") from error
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **config.for_transformers(),
        "head_dim": config.head_dim, "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None,
        "torch_dtype": "float32",
    }  # fmt: skip
    write_json(folder / "config.json", llama)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # which safetensors lets only its owner read
    if dataset.tokenizer:
        shutil.copy(dataset.tokenizer, folder / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_json(folder / "tokenizer_config.json", settings)
    else:  # not those of another run
        for name in SAVED[2:]:
            (folder / name).unlink(missing_ok=True)


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
        "learning rate schedule": schedule.described(options), "products in FP8": options.switches.get("fp8", False),
        "data sha256": dataset.sha256, "precision": precision.name, "TF32": options.allow_tf32,
    }  # fmt: skip


def found(folder: Path) -> list[Path]:
    """The folders that are named as checkpoints, the newest last."""
    return sorted(path for path in folder.glob(NAME) if path.is_dir())


@contextmanager
def taken(folder: Path, resume: bool) -> Iterator[None]:
    """Locks --checkpoint-dir before any work, in the process that writes there. The kernel ends the lock with the process.

    A file system that locks within one host only (Lustre mounted with localflock) does not show the run of another host.

    UsageError: it cannot be used: no file can be written there, another run uses it, or it has checkpoints without --resume.
    """
    with open(writable_folder(folder, "--checkpoint-dir") / ".lock", "ab", opener=files.without_waiting) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--checkpoint-dir: another run uses {folder}: wait for its end, or name another folder") from None
        except OSError as error:  # of a network file system without locks
            print(f"{folder} cannot be locked ({error.strerror}): start no other run with it", flush=True)
        if (there := found(folder)) and not resume:
            raise UsageError(f"--checkpoint-dir: {there[-1]} is there: go on from it with --resume, or name another folder")
        yield


def _is_ours(folder: Path) -> bool:
    """Whether the record in a folder of our form names it; all others are left alone."""
    try:
        regular = (folder / POSITION).is_file() and not folder.is_symlink()
        return regular and f"step-{files.read(folder / POSITION, Position)['step']:08d}" in folder.name
    except (OSError, UsageError):
        return False


def _checksum(path: Path) -> str:
    if not path.is_file():  # a pipe would never end
        raise RunError(f"{path.name} is missing, or not a regular file")
    return files.checksum(path)


def _listed(folder: Path) -> list[tuple[str, str]]:
    """The checksum and the name of each file, from SHA256SUMS."""
    if not (folder / SUMS).is_file():
        raise RunError(f"it has no {SUMS}, as those of version 1.0")
    text = (folder / SUMS).read_text(encoding="ascii", errors="replace")
    listed = re.findall(r"^([0-9a-f]{64})  ([\w.]+)\n", text, re.MULTILINE)
    if text.count("\n") != len(listed) or not {POSITION, METADATA} <= {name for _, name in listed}:
        raise RunError(f"{SUMS} is damaged")
    return listed


def _damage(folder: Path) -> str:
    """The reason why a checkpoint is not whole, empty if it is. All processes must call it: each reads its share of the files."""
    here, reason = ranks.here(), ""
    try:
        for checksum, name in _listed(folder)[here.rank :: here.world_size]:
            if _checksum(folder / name) != checksum:
                reason = f"{name} is not as {SUMS} has it"
    except (OSError, RunError) as error:
        reason = str(error)
    return next(filter(None, distributed.gathered(reason)), "")


class _Unpickler(pickle.Unpickler):
    """Finds PICKLED and dtypes alone: a pickle may name any function, which would be called."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "PosixPath":  # of the folder; the name of its module depends on Python's version
            return PurePosixPath
        if name == "getattr":  # Python 3.11.0 names a member of an enumeration so
            return lambda kind, member: kind.__members__[member]
        if name in PICKLED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _metadata(folder: Path) -> Any:
    """The Metadata in a checkpoint. RunError: it is damaged, or names what could run code, or a file of none of its own."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        strange = {place.relative_path for place in metadata.storage_data.values()} - {name for _, name in _listed(folder)}
        if strange:
            raise pickle.UnpicklingError(f"it names {strange.pop()}, which {SUMS} does not have")
    except Exception as error:  # a pickle that is damaged or made up can raise any
        raise RunError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return metadata


class Checkpoints:
    """The checkpoints of a run, before which `first` steps were finished; 0 for a new one."""

    def __init__(self, options: RunOptions, inputs: dict[str, Any]) -> None:
        """Finds the newest whole one for --resume. UsageError: it is another run's, or its end; RunError: none is whole."""
        self.folder, self.every, self.inputs = options.checkpoint_dir or Path(), options.checkpoint_every, inputs
        self.on = options.checkpoint_dir is not None
        names = [path.name for path in found(self.folder)] if options.resume else []
        folder, names = distributed.gathered((self.folder.absolute(), names))[0]
        if not ranks.here().main_process:  # its working folder may be another
            self.folder = folder
        self.position = Position(schema="tiny-llama-checkpoint/1", step=0, inputs={}, scaler={})
        self.source, damaged = self._newest_whole(names)
        if self.source:
            self.position = files.read(self.source / POSITION, Position)
            self._check(options.num_steps)
            print(f"going on from {self.source}{', as ' * bool(damaged)}{damaged}")
        elif names:
            raise RunError(f"no checkpoint in {self.folder} is whole: {damaged}; start again in another folder", shared=True)
        elif options.resume:
            print(f"no checkpoint in {self.folder} yet: starting from the first step")
        self.first = self.position["step"]
        self.kept = [self.source] if self.source else []

    def _newest_whole(self, names: list[str]) -> tuple[Path | None, str]:
        """The checkpoint to go on from, and the damage of those after it."""
        damages: list[str] = []
        for name in reversed(names):
            if not (damage := _damage(self.folder / name)):
                return self.folder / name, "; ".join(damages)
            damages.append(f"{name} is damaged ({damage})")
        return None, "; ".join(damages)

    def _check(self, num_steps: int) -> None:
        saved = {"learning rate schedule": "constant", "products in FP8": False, "TF32": self.inputs["TF32"]}  # not in older ones
        saved |= self.position["inputs"]
        changed = {name: value for name, value in self.inputs.items() if saved.get(name) != value}
        if differing := [f"{name} ({saved.get(name)}, now {value})" for name, value in changed.items()]:
            raise UsageError(f"--resume: {self.source} is of a run with another {', '.join(differing)}; give the same")
        if self.position["step"] >= num_steps:
            raise UsageError(f"--resume: {self.source} leaves nothing to train: raise --num-steps (now {num_steps})")

    def load(self, prepared: Prepared, precision: Precision) -> None:
        """Takes what is to be saved, and reads it from the checkpoint to go on from, if any. RunError: it cannot be read."""
        self.prepared, self.precision = prepared, precision
        if not self.source:
            return
        from torch.distributed import checkpoint as dcp

        reader, rank, metadata = dcp.FileSystemReader(self.source), ranks.here().rank, _metadata(self.source)
        reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]  # its own unpickles everything
        with _failure_explained(f"cannot read {self.source}"):
            saved = metadata.state_dict_metadata
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
        return self.on and (last or (self.every is not None and finished % self.every == 0))

    def save(self, finished: int) -> None:
        """Writes the state after these steps, and removes all but the KEPT newest checkpoints. RunError: it cannot be written."""
        from torch.distributed import checkpoint as dcp

        here, target = ranks.here(), self.folder / f"step-{finished:08d}"
        building: Path = distributed.gathered(files.temporary_name(target.absolute()))[0]
        with _failure_explained(f"cannot write {target}"):
            if here.main_process:
                for left_over in filter(_is_ours, self.folder.glob(f".{NAME}.{16 * '[0-9a-f]'}")):  # by a process that was killed
                    shutil.rmtree(left_over)
                building.mkdir()
                scaler = self.precision.scaler.state_dict()
                position = Position(schema="tiny-llama-checkpoint/1", step=finished, inputs=self.inputs, scaler=scaler)
                write_json(building / POSITION, position)
            distributed.wait_for_all()
            distributed.gather_weights(self.prepared.optimizer)
            states = distributed.whole_states(self.prepared.optimizer)
            state, writer = _tensors(self.prepared, states, here.rank), dcp.FileSystemWriter(building)
            dcp.save(state, storage_writer=writer, no_dist=not distributed.active())
            written = [*building.glob(f"__{here.rank}_*"), *here.main_process * [building / METADATA, building / POSITION]]
            sums = distributed.gathered([(path.name, _checksum(path)) for path in written])
            if here.main_process:
                self._complete(building, target, sorted(itertools.chain(*sums)))
        distributed.wait_for_all()
        print(f"saved {target}", flush=True)

    def _complete(self, building: Path, target: Path, sums: list[tuple[str, str]]) -> None:
        """Gives a checkpoint that all processes have written its checksums and its name, and removes those that are too old."""
        if strange := [name for name, _ in sums if not (building / name).is_file()]:
            raise RunError(f"cannot write {target}: {strange[0]} is on another node; name a folder that all nodes share")
        (building / SUMS).write_text("".join(f"{checksum}  {name}\n" for name, checksum in sums), encoding="ascii")
        if target.exists():  # a damaged checkpoint, or none of ours
            other = target.rename(f"{target}.{secrets.token_hex(4)}")
            print(f"{target} was there: it is {other} now")
        building.rename(target)
        self.kept = [*self.kept, target][-KEPT:]
        for old in found(self.folder):
            if old.name < self.kept[0].name and _is_ours(old):
                shutil.rmtree(old)


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
    except OSError as error:
        raise RunError(f"{what}: {error}") from error
