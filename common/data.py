"""Training data: real text by default, and a synthetic source whose best possible loss is known.

- `stdlib`: the source of this interpreter's standard library without its tests (about 10 MB of Python that every
  machine has), as tokens of a byte-level BPE trained on it. It differs between Python versions, and by the paths in its
  build's configuration even between installations of one; so do the losses.
- `synthetic`: a seeded Markov chain. Every state has the same few successor probabilities, so its entropy per token,
  the loss that no model can beat, is exactly that of those probabilities.
- a file: any UTF-8 text, through a BPE trained on it.

Tokens and tokenizer are cached under a name that holds the text's sha256, so a cache is never stale; several processes
may start at once, and a read-only home folder sends the cache to the temporary folder.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError
from common.files import read_json, write_json

import numpy as np
import torch
from torch import Tensor

SYNTHETIC_TOKENS = 1_000_000
SYNTHETIC_SUCCESSORS = 8
CACHE_SCHEMA = "tiny-llama-tokens/1"
BYTE_ALPHABET = 256  # a byte-level BPE has at least one token a byte


@dataclass(frozen=True)
class Dataset:
    """One stream of token ids.

    Attributes:
        name: `stdlib`, `synthetic`, or the file's path.
        tokens: [N] ids below the vocabulary size.
        sha256: of the text (of the token ids for synthetic data).
        entropy_floor: nats per token that no model can beat, where it is known.
        tokenizer: path of tokenizer.json; None for synthetic data.
    """

    name: str
    tokens: np.ndarray
    sha256: str
    entropy_floor: float | None = None
    tokenizer: Path | None = None

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name, "tokens": len(self.tokens), "sha256": self.sha256,
            "python": platform.python_version(), "entropy_floor": self.entropy_floor,
        }  # fmt: skip


def load(name: str, vocab_size: int, seed: int) -> Dataset:
    """The dataset called `stdlib` or `synthetic`, or the text file of that name.

    Raises:
        UsageError: the file cannot be read, is empty or not UTF-8, or the vocabulary is too small for a byte-level BPE.
        RunError: the tokens could not be made.
    """
    if name == "synthetic":
        return markov(vocab_size, seed)
    if vocab_size < BYTE_ALPHABET:
        raise UsageError(
            f"vocabulary of {vocab_size}: text needs at least {BYTE_ALPHABET} (one a byte); raise it or use --data synthetic"
        )
    if name == "stdlib":
        return _tokenized(name, [path.read_text(encoding="utf-8", errors="replace") for path in _stdlib_modules()], vocab_size)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--data {name}: {error.strerror}; give a text file, `stdlib` or `synthetic`") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {name} is not UTF-8 text (byte {error.start}); convert it first") from error
    if not text:
        raise UsageError(f"--data {name} is empty")
    return _tokenized(name, [text], vocab_size)


def _stdlib_modules() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts))


def markov(vocab_size: int, seed: int) -> Dataset:
    """A Markov chain over V states; each goes to 8 successors with probabilities proportional to 1, 1/2, ..., 1/8."""
    generator = np.random.default_rng(seed)
    successors = min(SYNTHETIC_SUCCESSORS, vocab_size)
    probabilities = 1.0 / np.arange(1, successors + 1)
    probabilities /= probabilities.sum()
    # Distinct successors for every state: permuted[(state + offset) mod V] with distinct offsets.
    permuted = generator.permutation(vocab_size).tolist()
    offsets = generator.choice(vocab_size, successors, replace=False)
    steps = offsets[generator.choice(successors, SYNTHETIC_TOKENS, p=probabilities)].tolist()
    tokens, state = [], 0
    for step in steps:
        state = permuted[(state + step) % vocab_size]
        tokens.append(state)
    ids = np.array(tokens, dtype=np.uint32)
    floor = float(-(probabilities * np.log(probabilities)).sum())
    return Dataset("synthetic", ids, hashlib.sha256(ids.tobytes()).hexdigest(), entropy_floor=floor)


class Batches:
    """A fixed sequence of batches of random windows, the same for the same seed on every device.

    `batches[i]` is (input_ids, targets), each [B, S] int64 on the device; targets are the tokens that follow (shifted by
    one here, and nowhere else). An index past the end starts over.

    Raises:
        UsageError: the data is shorter than one window.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, sequence_length: int, count: int, seed: int, device: torch.device
    ) -> None:
        available = len(dataset.tokens) - sequence_length
        if available < 1:
            raise UsageError(
                f"data {dataset.name} has {len(dataset.tokens)} tokens, too few for a sequence length of "
                f"{sequence_length}: lower --seq-len or give more text"
            )
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(available, (count, batch_size, 1), generator=generator).to(device)  # [count, B, 1]
        self.tokens = torch.from_numpy(dataset.tokens.astype(np.int64)).to(device)  # [N]
        self.window = torch.arange(sequence_length + 1, device=device)  # [S + 1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = self.tokens[self.starts[index % len(self.starts)] + self.window]  # [B, S + 1]
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ------------------------------------------------------------------------------------------------------------- cache


def cache_folder() -> Path:
    """A folder of ours that can be written to: in the user's cache, else in the temporary folder."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tiny_llama"  # "~" stays without a home
    shared = Path(tempfile.gettempdir()) / f"tiny_llama-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
    for folder in (shared,) if user.parts[0] == "~" else (user, shared):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise UsageError(f"neither {user} nor {shared} can be written to: set XDG_CACHE_HOME to a folder that can")


def _tokenized(name: str, documents: list[str], vocab_size: int) -> Dataset:
    import tokenizers

    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    key = f"{digest[:16]}-v{vocab_size}-py{platform.python_version()}-tokenizers{tokenizers.__version__}"
    folder = cache_folder() / key
    if not _intact(folder):
        _build(folder, documents, vocab_size, digest)
    return Dataset(name, np.load(folder / "tokens.npy"), digest, tokenizer=folder / "tokenizer.json")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _intact(folder: Path) -> bool:
    """Whether the files are the ones that the cache's own record, written last, speaks of."""
    record = folder / "meta.json"
    if not record.exists():
        return False
    try:
        return all(_checksum(folder / file) == sha256 for file, sha256 in read_json(record, CACHE_SCHEMA)["files"].items())
    except (UsageError, OSError):
        return False


def _build(folder: Path, documents: list[str], vocab_size: int, digest: str) -> None:
    """Builds beside `folder` and moves into place; where another process was faster, its result stays."""
    from common import bpe

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as name:
        building = Path(name)
        bpe.build(documents, documents, vocab_size, building)
        checksums = {name: _checksum(building / name) for name in bpe.FILES}
        meta = {"schema": CACHE_SCHEMA, "text_sha256": digest, "python": platform.python_version(), "files": checksums}
        write_json(building / "meta.json", meta)
        if folder.exists() and not _intact(folder):
            shutil.rmtree(folder)
        try:
            building.rename(folder)
        except OSError:
            if not _intact(folder):
                raise
