"""Training data is the same for the same seed, is cached safely, and is refused in one line if it
cannot be used.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from common import data
from common.ranks import Ranks
from tests.conftest import ROOT
from tracepage.errors import RunError, UsageError

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

CPU = torch.device("cpu")
TEXT = "".join(
    f"def f{i}(x):\n    return x * {i} + {i * i}  # Gr\u00f6\u00dfe\n" for i in range(300)
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tiny_llama"


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(TEXT, encoding="utf-8")
    return path


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


# ----------------------------------------------------------------------------------------------------------- batches


def draw(
    dataset: data.Dataset, shape: tuple[int, int], count: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = data.Batches(dataset, (*shape, count), seed, CPU)
    return [source[i] for i in range(count)]


def counting(length: int) -> data.Dataset:
    """The tokens 0, 1, 2, ..., so that a token is its own position."""
    return data.Dataset("counting.txt", np.arange(length, dtype=np.uint32), "")


def test_targets_are_the_inputs_shifted_by_one() -> None:
    for input_ids, targets in draw(counting(1000), (4, 16), 20):
        assert input_ids.shape == targets.shape == (4, 16)
        assert input_ids.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, input_ids + 1)  # the token after n is n + 1
        assert torch.equal(input_ids[:, 1:], targets[:, :-1])


def test_several_processes_share_the_batch_of_one_in_the_order_of_their_ranks() -> None:
    alone = data.Batches(counting(1000), (6, 16, 5), 1, CPU)
    ranks = [
        data.Batches(counting(1000), (2, 16, 5), 1, CPU, Ranks(rank, world_size=3))
        for rank in range(3)
    ]
    for i in range(5):
        for tensors, expected in zip(
            zip(*(batches[i] for batches in ranks), strict=True), alone[i], strict=True
        ):
            assert torch.equal(torch.cat(tensors), expected)


@pytest.mark.parametrize(
    ("rank", "world_size", "last"), [(0, 1, [319, 39, 977, 53]), (2, 3, [792, 613, 12, 305])]
)
def test_windows_are_those_of_recorded_losses_and_start_over_at_the_end(
    rank: int, world_size: int, last: list[int]
) -> None:
    batches = data.Batches(counting(1000), (4, 16, 60), 7, CPU, Ranks(rank, world_size=world_size))
    assert batches[59][0][:, 0].tolist() == last and torch.equal(batches[60][0], batches[0][0])


def test_every_window_of_the_data_can_be_drawn() -> None:
    starts = {int(input_ids[0, 0]) for input_ids, _ in draw(counting(12), (1, 8), 100)}
    assert starts == {0, 1, 2, 3}  # 12 tokens hold 4 windows of 8 + 1
    assert draw(counting(16), (1, 15), 1)[0][1].tolist() == [list(range(1, 16))]
    with pytest.raises(
        UsageError,
        match="counting.txt has 16 tokens, too few for a sequence length of 16: lower --seq-len",
    ):
        draw(counting(16), (1, 16), 1)


def test_more_batches_than_fit_into_memory_are_refused_as_such() -> None:
    with pytest.raises(
        RunError, match=r"1,000,000,000 batches of 500,000,000 sequences .* lower --num-steps"
    ):
        data.Batches(counting(1000), (5 * 10**8, 16, 10**9), 0, CPU)


# --------------------------------------------------------------------------------------------------------- synthetic


@pytest.mark.parametrize("vocab_size", [5, 50])
def test_entropy_floor_is_that_of_the_stream(vocab_size: int) -> None:
    """Conditional entropy H(next | current) estimated from the counts of pairs.

    Its standard error is the deviation of -log p over sqrt(N), below 1e-3 for a million tokens; the
    estimate's bias is the number of free probabilities (V x 7) over 2 N, smaller still.
    """
    dataset = data.markov(vocab_size, seed=3)
    tokens = dataset.tokens.astype(np.int64)
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    pairs = np.bincount(tokens[:-1] * vocab_size + tokens[1:], minlength=vocab_size**2).reshape(
        vocab_size, vocab_size
    )
    conditional = pairs / pairs.sum(axis=1, keepdims=True)
    entropy = -(pairs / pairs.sum() * np.log(np.where(pairs, conditional, 1))).sum()
    assert abs(entropy - dataset.entropy_floor) < 4e-3
    # each state has as many successors as it should
    assert (np.count_nonzero(pairs, axis=1) == min(8, vocab_size)).all()
    shares = 1 / np.arange(1, min(8, vocab_size) + 1)
    shares /= shares.sum()
    assert dataset.entropy_floor == pytest.approx(-(shares * np.log(shares)).sum())
    again, other = (data.load("synthetic", vocab_size, seed) for seed in (3, 4))
    assert (
        np.array_equal(dataset.tokens, again.tokens)
        and dataset.sha256 == again.sha256 != other.sha256
    )
    assert dataset.tokenizer is None


# -------------------------------------------------------------------------------------------------------------- text


def test_standard_library_is_the_default_text() -> None:
    """In the user's own cache: the other tests train on it too."""
    dataset = data.load("stdlib", 1000, seed=0)
    assert len(dataset.tokens) > 1_000_000
    assert dataset.tokens.max() < 1000
    start = Tokenizer.from_file(str(dataset.tokenizer)).decode(dataset.tokens[:2000].tolist())
    first = next(path for path in sorted(Path(os.__file__).parent.glob("*.py")))
    assert first.read_text(encoding="utf-8").startswith(start[:500])


def test_modules_of_the_standard_library_that_cannot_be_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to nothing, one to itself, and a folder with the name of a module."""
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").symlink_to("nowhere.py")
    (tmp_path / "c.py").symlink_to("c.py")
    (tmp_path / "d.py").mkdir()
    (tmp_path / "e.py").write_text("e = 1\n")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [*data._stdlib_modules()] == ["a = 1\n", "e = 1\n"]


def test_a_text_and_vocabulary_go_through_a_tokenizer_once(cache: Path, text_file: Path) -> None:
    first = data.load(str(text_file), 300, seed=0)
    tokenizer = Tokenizer.from_file(str(first.tokenizer))
    assert tokenizer.decode(first.tokens.tolist()) == TEXT
    assert tokenizer.get_vocab_size() == 300 > first.tokens.max() and first.entropy_floor is None
    assert len(first.tokens) < len(TEXT.encode())  # merges were learnt
    (entry,) = entries(cache)
    times = {path.name: path.stat().st_mtime_ns for path in entry.iterdir()}
    assert times.keys() == {"tokenizer.json", "tokens.npy"}
    second = data.load(str(text_file), 300, seed=1)
    assert np.array_equal(first.tokens, second.tokens)
    assert entries(cache) == [entry]
    assert {path.name: path.stat().st_mtime_ns for path in entry.iterdir()} == times
    data.load(str(text_file), 320, seed=0)
    text_file.write_text(TEXT + "x = 1\n", encoding="utf-8")
    third = data.load(str(text_file), 300, seed=0)
    assert len(entries(cache)) == 3
    # not the first entry, although the file's name is the same
    assert len(third.tokens) > len(first.tokens)


def test_what_a_killed_build_left_is_removed_a_day_later(cache: Path, text_file: Path) -> None:
    data.load(str(text_file), 300, seed=0)
    (entry,) = entries(cache)
    old, new = entry.with_name(f".{entry.name}-old"), entry.with_name(f".{entry.name}-new")
    for left in (old, new):
        left.mkdir()
    os.utime(old, (0, 0))
    data.load(str(text_file), 301, seed=0)
    assert not old.exists() and new.exists()


def test_damaged_tokens_are_refused(cache: Path, text_file: Path) -> None:
    data.load(str(text_file), 300, seed=0)
    (entry,) = entries(cache)
    whole = np.load(entry / "tokens.npy")
    for damaged in (whole + 300, whole[None]):  # of a larger vocabulary, of another shape
        np.save(entry / "tokens.npy", damaged)
        with pytest.raises(UsageError, match="are damaged"):
            data.load(str(text_file), 300, seed=0)
    np.save(entry / "tokens.npy", whole)
    (entry / "tokens.npy").write_bytes((entry / "tokens.npy").read_bytes()[:-100])
    with pytest.raises(
        UsageError, match=f"the cached tokens in {entry} are damaged: remove that folder"
    ):
        data.load(str(text_file), 300, seed=0)


def test_whoever_may_read_the_folder_of_the_cache_may_read_what_is_in_it(
    cache: Path, text_file: Path
) -> None:
    before = os.umask(0o002)
    try:
        data.load(str(text_file), 300, seed=0)
    finally:
        os.umask(before)
    (entry,) = entries(cache)
    assert [path.stat().st_mode & 0o777 for path in (cache, entry)] == [0o775, 0o775]
    assert {path.stat().st_mode & 0o777 for path in entry.iterdir()} == {0o664}


def test_a_cache_that_only_another_user_may_read_is_no_damage(
    cache: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", "tokens.npy")

    data.load(str(text_file), 300, seed=0)
    monkeypatch.setattr(data, "writable_folder", None)  # What is there needs no place to write.
    data.load(str(text_file), 300, seed=0)
    monkeypatch.setattr(np, "load", denied)
    with pytest.raises(UsageError, match=r"another user's \(Permission denied\): ask for"):
        data.load(str(text_file), 300, seed=0)


def test_a_user_without_a_home_names_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(
        UsageError, match="no home folder for the cache: name a folder in XDG_CACHE"
    ):
        data.cache_folder()


# ------------------------------------------------------------------------------------------------------------ pieces

MIXED = (
    "\ufeffIt's  42\u00a0m\u00b2.\r\n\r\n\t\u4e2d\u6587 \u3000\u4f60\u597d\uff01"
    " \n x\x1c y\n\n\n  we'll   go \U0001f600\U0001f600 ...!?\u00a0\t  \n"
)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_pieces_give_the_tokens_of_the_whole(cache, tmp_path, monkeypatch, piece: int) -> None:
    """Words, numbers, signs, several kinds of white space in a row, and characters of several
    bytes, cut wherever it may be.
    """
    (tmp_path / "mixed.txt").write_bytes((MIXED * 40 + "end").encode())
    monkeypatch.setattr(data, "PIECE", piece)
    dataset = data.load(str(tmp_path / "mixed.txt"), 400, seed=0)
    text = (MIXED * 40 + "end").replace("\r\n", "\n")
    assert len([*data._pieces(text)]) > 30 and "".join(data._pieces(text)) == text
    assert dataset.tokens.tolist() == Tokenizer.from_file(str(dataset.tokenizer)).encode(text).ids
    assert dataset.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_processes_that_start_at_once_on_an_empty_cache(cache, text_file) -> None:
    code = "import sys\nfrom common import data\nprint(data.load(sys.argv[1], 300, 0).tokens.tobytes().hex())"
    command = [sys.executable, "-c", code, str(text_file)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "-1",
        "RAYON_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=900)[0].strip() for process in started}
    assert (
        said == {data.load(str(text_file), 300, 0).tokens.tobytes().hex()}
        and len(entries(cache)) == 1
    )


# ---------------------------------------------------------------------------------------------------------- held out


def test_the_last_twentieth_is_held_out_and_what_is_left_has_a_hash_of_its_own() -> None:
    dataset = counting(1000)
    training, held_out = data.split(dataset)
    assert training.tokens.tolist() == list(range(950)) and held_out.tokens.tolist() == list(
        range(950, 1000)
    )
    assert training.sha256 == hashlib.sha256(dataset.tokens[:950].tobytes()).hexdigest()
    with pytest.raises(
        UsageError,
        match=r"counting.txt \(held out\) has 50 tokens, too few for a sequence length of 64",
    ):
        draw(held_out, (1, 64), 1)


# --------------------------------------------------------------------------------------------------------- bad files


def test_a_file_that_is_no_text_is_refused(cache: Path, tmp_path: Path) -> None:
    for content, message in (
        (b"", "--data .*a.txt is empty"),
        ("Gr\u00f6\u00dfe".encode("latin-1"), r"not UTF-8 text \(byte 2\)"),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(UsageError, match=message):
            data.load(str(tmp_path / "a.txt"), 300, seed=0)
    with pytest.raises(UsageError, match="vocabulary of 255: text needs at least 256"):
        data.load(str(tmp_path / "a.txt"), 255, seed=0)
    assert not cache.exists()
