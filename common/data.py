"""Training data: real text by default, and a synthetic source whose best possible loss is known.

- `stdlib`: the source of this interpreter's standard library without its tests (about 10 MB of Python that every
  machine has), as tokens of a byte-level BPE trained on it. It differs between Python versions. Paths in the
  configuration of the build differ even between installations of one version. So losses differ, too.
- `synthetic`: a seeded Markov chain. Every state has the same few successor probabilities, so its entropy per token,
  the loss that no model can beat, is exactly that of those probabilities.
- a file: any UTF-8 text, through a BPE trained on it.

Tokens and tokenizer are cached under a name that holds the text's sha256, so a cache is never stale; several processes
may start at once, and a read-only home folder sends the cache to the temporary folder.

Text is read and encoded in pieces, and the tokens are a file that is mapped into memory, so the memory that the preparation takes
does not grow with the text. The BPE of a longer text than TRAINING_TEXT is trained on pieces spread over it.
"""

import codecs
import contextlib
import hashlib
import io
import itertools
import math
import os
import platform
import re
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.device import is_gpu
from common.errors import UsageError
from common.files import checksum, opened, read_json, write_json
from common.progress import progress

import numpy as np
import torch
from torch import Tensor

SYNTHETIC_TOKENS = 1_000_000
SYNTHETIC_SUCCESSORS = 8
CACHE_SCHEMA = "tiny-llama-tokens/1"
CACHED = ("tokenizer.json", "tokens.npy")  # and meta.json, with their checksums
BYTE_ALPHABET = 256  # a byte-level BPE has at least one token a byte
PIECE = 2**18  # bytes of a file that are read at once; the trainer holds up to 256 pieces
LONGEST_WORD = 2**22  # characters that are encoded as one: a word, or a run of white space
TRAINING_TEXT = 2**26  # characters of text that a BPE is trained on at most; the standard library has about 10 million
DRAWN_AT_ONCE = 2**20  # windows of all processes; their starts take 8 MiB
BEFORE_WHITE_SPACE = re.compile(r".*\S(?=[ \n])", re.DOTALL)


@dataclass(frozen=True)
class Dataset:
    """One stream of token ids."""

    name: str  # `stdlib`, `synthetic`, or the file's path
    tokens: np.ndarray  # [N] ids below the vocabulary size
    sha256: str  # of the text (of the token ids for synthetic data)
    entropy_floor: float | None = None  # nats per token that no model can beat, where it is known
    tokenizer: Path | None = None  # path of tokenizer.json; None for synthetic data

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name, "tokens": len(self.tokens), "sha256": self.sha256,
            "python": platform.python_version(), "entropy_floor": self.entropy_floor,
        }  # fmt: skip


def load(name: str, vocab_size: int, seed: int) -> Dataset:
    """The dataset called `stdlib` or `synthetic`, or the text file of that name.

    UsageError: the file cannot be read, changes while it is, is empty or not UTF-8, or the vocabulary is too small for a
    byte-level BPE.
    """
    if name == "synthetic":
        return markov(vocab_size, seed)
    if vocab_size < BYTE_ALPHABET:
        raise UsageError(
            f"vocabulary of {vocab_size}: text needs at least {BYTE_ALPHABET} (one a byte); raise it or use --data synthetic"
        )
    with progress(f"preparing the data {name}") as note, contextlib.ExitStack() as stack:
        if name == "stdlib":
            return _tokenized(_Text(name, _stdlib_modules, "\0"), vocab_size, note)
        try:
            file = stack.enter_context(opened(Path(name), "--data"))
        except OSError as error:
            raise UsageError(f"--data {name}: {error.strerror}; give a text file, `stdlib` or `synthetic`") from error
        return _tokenized(_Text(name, lambda: _pieces(file, name), ""), vocab_size, note)


def _stdlib_modules() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts)):
        yield path.read_text(encoding="utf-8", errors="replace")


def _pieces(file: BinaryIO, name: str) -> Iterator[str]:
    """The text of a file in pieces, with the tokens of the whole: they are cut before white space, where a byte-level BPE cuts.

    Its expression for a word (Radford et al. 2019, GPT-2) takes white space only at the beginning of a word, or by itself.

    UsageError: the text cannot be read, is not UTF-8, or has LONGEST_WORD characters between two cuts.
    """
    decoder, text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True), ""
    try:
        file.seek(0)
        while block := file.read(PIECE):
            text += _decoded(decoder, file, block, name)
            if cut := BEFORE_WHITE_SPACE.match(text):
                yield cut[0]
                text = text[cut.end() :]
            elif len(text) > LONGEST_WORD:
                what = "without white space" if text.strip() else "of white space alone"
                raise UsageError(f"--data {name} has {LONGEST_WORD:,} characters {what}: give text, in lines")
    except OSError as error:
        raise UsageError(f"--data {name} cannot be read to its end: {error.strerror}; copy it first") from error
    text += _decoded(decoder, file, block, name)
    if text:
        yield text


def _decoded(decoder: io.IncrementalNewlineDecoder, file: BinaryIO, block: bytes, name: str) -> str:
    """The text of a block that was read from a file last; an empty block ends the file."""
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:  # its object is the block and what was left of the one before
        position = file.tell() - len(error.object) + error.start
        raise UsageError(f"--data {name} is not UTF-8 text (byte {position}); convert it first") from error


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

    The windows are drawn in blocks of about DRAWN_AT_ONCE, of which one is held. To reach a batch, all blocks before it are
    drawn (about 10 ns a window), from the seed if it lies before the block that is held.

    Of `world_size` processes, each gets B sequences of a batch of world_size x B, in the order of the ranks: together they see
    what one process with that batch size sees.

    UsageError: the data is shorter than one window.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, sequence_length: int, count: int, seed: int, device: torch.device,
        rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        available = len(dataset.tokens) - sequence_length
        if available < 1:
            raise UsageError(
                f"data {dataset.name} has {len(dataset.tokens)} tokens, too few for a sequence length of "
                f"{sequence_length}: lower --seq-len or give more text"
            )
        steps = min(count, math.ceil(DRAWN_AT_ONCE / (world_size * batch_size)))
        self.available, self.shape, self.rank = available, (steps, world_size, batch_size, 1), rank
        self.count, self.seed, self.device, self.generator = count, seed, device, torch.Generator()
        self.block = 0
        self._seek(0)
        tokens = torch.from_numpy(dataset.tokens.view(np.int32))  # [N]; on a CPU not a copy, but the file itself
        self.tokens = tokens.to(device).long() if is_gpu(device) else tokens
        self.window = torch.arange(sequence_length + 1, device=device)  # [S + 1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        block, step = divmod(index % self.count, self.shape[0])
        if block != self.block:
            self._seek(block)
        ids = self.tokens[self.starts[step] + self.window].long()  # [B, S + 1]
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _seek(self, block: int) -> None:
        """Draws the window starts of a block; the numbers are those of one draw for all steps."""
        ahead = block - self.block
        if ahead <= 0:
            self.generator.manual_seed(self.seed)
            ahead = block + 1
        for _ in range(ahead):
            starts = torch.randint(self.available, self.shape, generator=self.generator)
        self.block, self.starts = block, starts[:, self.rank].to(self.device)  # [steps of a block, B, 1]


def cache_folder() -> Path:
    """A folder of ours that can be written to: in the user's cache, else in the temporary folder, where no one else may write."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tiny_llama"  # "~" stays without a home
    shared = Path(tempfile.gettempdir()) / f"tiny_llama-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
    for folder in (shared,) if user.parts[0] == "~" else (user, shared):
        try:
            folder.mkdir(mode=0o700 if folder == shared else 0o777, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                if folder == user or _is_private(folder):
                    return folder
        except OSError:
            continue
    raise UsageError(
        f"neither {user} nor {shared} can be written to by this user, and in the latter by this user alone: "
        "set XDG_CACHE_HOME to a folder that can"
    )


def _is_private(folder: Path) -> bool:
    """Whether a folder, which is no link, belongs to this user, and only this user can write in it."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022 and status.st_uid == os.getuid()


@dataclass(frozen=True)
class _Text:
    """A text that is read several times, in pieces of which each is encoded by itself; `between` stands between two of them."""

    name: str
    pieces: Callable[[], Iterable[str]]
    between: str

    def hashed(self, digest: "hashlib._Hash") -> Iterator[str]:
        """The pieces. After the last one the digest is that of the text."""
        for number, piece in enumerate(self.pieces()):
            digest.update((self.between * bool(number) + piece).encode())
            yield piece


def _tokenized(text: _Text, vocab_size: int, note: Callable[[str], None]) -> Dataset:
    """The cached tokens of a text, under its sha256."""
    import tokenizers

    digest = hashlib.sha256()
    characters = sum(len(text.between) + len(piece) for piece in text.hashed(digest))
    if not characters:
        raise UsageError(f"--data {text.name} is empty")
    key = f"{digest.hexdigest()[:16]}-v{vocab_size}-py{platform.python_version()}-tokenizers{tokenizers.__version__}"
    folder = cache_folder() / key
    if not _intact(folder):
        _build(folder, text, characters, vocab_size, digest.hexdigest(), note)
    # Mapped, as copies of what is written to, because PyTorch takes no array that cannot be.
    tokens = np.load(folder / "tokens.npy", mmap_mode="c")
    return Dataset(text.name, tokens, digest.hexdigest(), tokenizer=folder / "tokenizer.json")


def _intact(folder: Path) -> bool:
    """Whether the files are the ones that the cache's own record, written last, speaks of."""
    if not (folder / "meta.json").exists():
        return False
    try:
        recorded = read_json(folder / "meta.json", CACHE_SCHEMA).get("files")
        return recorded == {name: checksum(folder / name) for name in CACHED}
    except (UsageError, OSError):
        return False


def _build(folder: Path, text: _Text, characters: int, vocab_size: int, digest: str, note: Callable[[str], None]) -> None:
    """Builds beside `folder` and moves into place; where another process was faster, its result stays.

    The BPE is trained on all pieces, or on every n-th if there is more text than TRAINING_TEXT.
    UsageError: the text that was trained on or encoded is not that of the digest.
    """
    from common import bpe

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as name:
        building = Path(name)
        every, trained, encoded = math.ceil(characters / TRAINING_TEXT), hashlib.sha256(), hashlib.sha256()

        def noted() -> Iterator[str]:
            done = 0
            for piece in text.hashed(encoded):
                yield piece
                done += len(piece)
                note(f"{done / characters:.0%} encoded")

        note("training the tokenizer")
        bpe.build(itertools.islice(text.hashed(trained), 0, None, every), noted(), vocab_size, building)
        if {trained.hexdigest(), encoded.hexdigest()} != {digest}:
            raise UsageError(f"--data {text.name} changed while it was read: give a file that stays as it is, such as a copy")
        checksums = {name: checksum(building / name) for name in CACHED}
        meta = {"schema": CACHE_SCHEMA, "text_sha256": digest, "python": platform.python_version(), "files": checksums}
        write_json(building / "meta.json", meta)
        if folder.exists() and not _intact(folder):
            _remove(folder)
        try:
            building.rename(folder)
        except OSError:
            if not _intact(folder):
                raise


def _remove(folder: Path) -> None:
    """Removes a damaged cache under another name, so that several processes that do this at once neither meet nor fail."""
    aside = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True)
    with aside as name, contextlib.suppress(FileNotFoundError):
        folder.rename(Path(name) / folder.name)
