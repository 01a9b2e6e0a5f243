"""Training data: real text by default, and a synthetic source whose best possible loss is known.

- `stdlib`: the source of this interpreter's standard library without its tests (about 10 MB of
  Python that every machine has), as tokens of a byte-level BPE trained on it. It differs between
  Python versions. Paths in the configuration of the build differ even between installations of one
  version. So losses differ, too.
- `synthetic`: a seeded Markov chain. Every state has the same few successor probabilities, so its
  entropy per token, the loss that no model can beat, is exactly that of those probabilities.
- a file: any UTF-8 text, through a BPE trained on it.

Tokens and tokenizer are cached in ~/.cache, or the folder XDG_CACHE_HOME, under a name that holds
the text's sha256, so a cache is never stale. Several processes may start at once.
"""

import hashlib
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.device import is_gpu
from common.ranks import Ranks
from tracepage.errors import RunError, UsageError
from tracepage.files import opened, writable_folder
from tracepage.terminal import progress

import numpy as np
import torch
from torch import Tensor

SOURCES = ("stdlib", "synthetic")  # Any other name is that of a file.
SYNTHETIC_TOKENS = 1_000_000
SYNTHETIC_SUCCESSORS = 8
HELD_OUT = 20  # the last 1/20 of the tokens
BYTE_ALPHABET = 256  # a byte-level BPE has at least one token a byte
PIECE = 2**18  # characters that are encoded at once, or more up to the next white space
ALONE = Ranks()
DAY = 86400  # seconds
# A byte-level BPE cuts before white space that follows something else (its expression for a word:
# Radford et al. 2019, GPT-2).
CUT = re.compile(r"\S(?=[ \t\n\u00a0])")


class Dataset(NamedTuple):
    """One stream of token ids."""

    name: str  # `stdlib`, `synthetic`, or the file's path
    tokens: np.ndarray  # [N] ids below the vocabulary size
    sha256: str  # of the text (of the token ids for synthetic data, and where a part is held out)
    entropy_floor: float | None = None  # nats per token that no model can beat, where it is known
    tokenizer: Path | None = None  # path of tokenizer.json; None for synthetic data

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tokens": len(self.tokens),
            "sha256": self.sha256,
            "python": platform.python_version(),
            "entropy_floor": self.entropy_floor,
        }


def load(name: str, vocab_size: int, seed: int) -> Dataset:
    """The dataset called `stdlib` or `synthetic`, or the text file of that name.

    UsageError: the file cannot be read, is empty or not UTF-8, or the vocabulary is too small for a
    byte-level BPE.
    """
    if name == "synthetic":
        return markov(vocab_size, seed)
    if vocab_size < BYTE_ALPHABET:
        raise UsageError(
            f"vocabulary of {vocab_size}: text needs at least {BYTE_ALPHABET} (one a byte); "
            "raise it or use --data synthetic"
        )
    with progress(f"preparing the data {name}"):
        texts = [*_stdlib_modules()] if name == "stdlib" else [_file(name)]
        if not any(texts):
            raise UsageError(f"--data {name} is empty")
        return _tokenized(name, texts, vocab_size)


def _stdlib_modules() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if skipped.intersection(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # Distributions leave links to nothing, and files that only root reads.
            continue
        yield text


def _file(name: str) -> str:
    with opened(Path(name)) as file:
        content = file.read()
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--data {name} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that have, encoded one by one, the tokens of the whole."""
    start = 0
    cut = CUT.search(text, PIECE)
    while cut:
        yield text[start : cut.end()]
        start = cut.end()
        cut = CUT.search(text, start + PIECE)
    yield text[start:]


def markov(vocab_size: int, seed: int) -> Dataset:
    """A Markov chain of V states; each goes to 8 others, as often as 1, 1/2, ..., 1/8."""
    generator = np.random.default_rng(seed)
    successors = min(SYNTHETIC_SUCCESSORS, vocab_size)
    probabilities = 1.0 / np.arange(1, successors + 1)
    probabilities /= probabilities.sum()
    # Distinct successors for every state: permuted[(state + offset) mod V] with distinct offsets.
    permuted = generator.permutation(vocab_size).tolist()
    offsets = generator.choice(vocab_size, successors, replace=False)
    steps = offsets[generator.choice(successors, SYNTHETIC_TOKENS, p=probabilities)].tolist()
    tokens = []
    state = 0
    for step in steps:
        state = permuted[(state + step) % vocab_size]
        tokens.append(state)
    ids = np.array(tokens, dtype=np.uint32)
    floor = float(-(probabilities * np.log(probabilities)).sum())
    return Dataset("synthetic", ids, hashlib.sha256(ids.tobytes()).hexdigest(), entropy_floor=floor)


def split(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """The data to train on, and the last twentieth of its tokens, which are held out."""
    start = len(dataset.tokens) - len(dataset.tokens) // HELD_OUT
    training = dataset.tokens[:start]
    held_out = dataset._replace(name=f"{dataset.name} (held out)", tokens=dataset.tokens[start:])
    digest = hashlib.sha256(training.data).hexdigest()
    return dataset._replace(tokens=training, sha256=digest), held_out


class Batches:
    """A fixed sequence of batches of random windows, the same for the same seed on every device.

    `batches[i]` is (input_ids, targets), each [B, S] int64 on the device; targets are the tokens
    that follow (shifted by one here, and nowhere else). An index past the end starts over.

    Of several processes, each gets B sequences of a batch of world_size x B, in the order of the
    ranks: together they see what one process with that batch size sees.

    UsageError: the data is shorter than one window. RunError: there are more batches than fit into
    memory.
    """

    def __init__(
        self,
        dataset: Dataset,
        sizes: tuple[int, int, int],
        seed: int,
        device: torch.device,
        rank: Ranks = ALONE,
    ) -> None:
        """`sizes`: B, S, and how many batches there are."""
        batch_size, sequence_length, count = sizes
        available = len(dataset.tokens) - sequence_length
        if available < 1:
            raise UsageError(
                f"data {dataset.name} has {len(dataset.tokens)} tokens, too few for a sequence "
                f"length of {sequence_length}: lower --seq-len or give more text"
            )
        generator = torch.Generator().manual_seed(seed)
        shape = (count, rank.world_size, batch_size, 1)
        try:
            starts = torch.randint(available, shape, generator=generator)[:, rank.rank]
        except RuntimeError as error:
            raise RunError(
                f"the places of {count:,} batches of {rank.world_size * batch_size:,} sequences "
                "do not fit into memory: lower --num-steps, --eval-steps or --batch-size"
            ) from error
        self.starts = starts.contiguous().to(device)  # [steps, B, 1]
        # [N]; on a CPU this is no copy, but the file itself.
        tokens = torch.from_numpy(dataset.tokens.view(np.int32))
        self.tokens = tokens.to(device).long() if is_gpu(device) else tokens
        self.window = torch.arange(sequence_length + 1, device=device)  # [S + 1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = self.tokens[self.starts[index % len(self.starts)] + self.window].long()  # [B, S + 1]
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def cache_folder() -> Path:
    """The folder of the caches. UsageError: nothing says where it is."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise UsageError(
            "this user has no home folder for the cache: name a folder in XDG_CACHE_HOME"
        ) from error
    return Path(caches) / "tiny_llama"


def _tokenized(name: str, texts: Sequence[str], vocab_size: int) -> Dataset:
    """The cached tokens of texts, under the sha256 of all."""
    import tokenizers

    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    versions = f"py{platform.python_version()}-tokenizers{tokenizers.__version__}"
    folder = cache_folder() / f"{digest[:16]}-v{vocab_size}-{versions}"
    if not folder.exists():
        writable_folder(folder.parent, "XDG_CACHE_HOME")
        _build(folder, [piece for text in texts for piece in _pieces(text)], vocab_size)
    try:  # mapped, as copies of what is written to, because PyTorch takes no array that cannot be
        tokens = np.load(folder / "tokens.npy", mmap_mode="c")
        if tokens.ndim != 1 or tokens.max() >= vocab_size:
            raise ValueError("they are of another vocabulary")
    except PermissionError as error:
        raise UsageError(
            f"the cached tokens in {folder} are another user's ({error.strerror}): "
            "ask for permission to read them, or name another folder in XDG_CACHE_HOME"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the cached tokens in {folder} are damaged: remove that folder"
        ) from error
    return Dataset(name, tokens, digest, tokenizer=folder / "tokenizer.json")


def _build(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
    """Builds beside `folder` and moves into place, unless another process was faster."""
    from common import bpe

    for leftover in folder.parent.glob(".*-v*"):  # of a build that was killed
        if time.time() - leftover.stat().st_mtime > DAY:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
    ) as name:
        bpe.build(texts, vocab_size, Path(name))
        # A temporary folder is its owner's alone; the cache may be shared.
        shutil.copymode(folder.parent, name)
        try:
            Path(name).rename(folder)
        except OSError:
            if not folder.exists():
                raise
