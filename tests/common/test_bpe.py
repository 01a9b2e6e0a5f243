"""The process that trains a BPE and encodes text: what it writes, its memory, and how it fails."""

import os
import random
import subprocess
import sys
from pathlib import Path

from common import bpe
from common.errors import RunError, UsageError
from tests.conftest import PATHS

import numpy as np
import pytest
from tokenizers import Tokenizer

TEXTS = ["", "ab abab\n", "\0 Gr\u00f6\u00dfe ab", *["ab" * 20] * bpe.ENCODED_AT_ONCE]
PEAK = """
import sys, torch
from common import data, device
data.load(sys.argv[1], 1000, 0)
device.reset_peak_memory(torch.device("cpu"))
print(device.peak_memory(torch.device("cpu"))["peak_mib"])
"""


def test_each_text_is_encoded_by_itself(tmp_path, monkeypatch):
    bpe.build(TEXTS[:2], iter(TEXTS), 260, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(bpe.FILES)
    tokenizer, tokens = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), np.load(tmp_path / "tokens.npy")
    assert tokens.dtype == np.uint32 and tokens.tolist() == [token for text in TEXTS for token in tokenizer.encode(text).ids]
    assert tokenizer.decode(tokens.tolist()) == "".join(TEXTS) and tokenizer.token_to_id("ab") is not None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak includes what was before")
def test_the_memory_of_a_run_is_the_same_with_and_without_a_cache(tmp_path):
    words = random.Random(0).choices([f"{number:x}" for number in range(200_000)], k=500_000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    environment = os.environ | {"PYTHONPATH": PATHS, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}

    def peak() -> float:
        command = [sys.executable, "-c", PEAK, str(tmp_path / "text.txt")]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900).stdout)

    assert peak() == pytest.approx(peak(), rel=0.05)


def test_what_fails_there_is_a_line(tmp_path):
    with pytest.raises(RunError, match="could not be cut into tokens: .*No such file or directory"):
        bpe.build(TEXTS, TEXTS, 260, tmp_path / "missing")


def test_it_does_not_outlive_what_fails_here(tmp_path):
    def interrupted():
        yield "text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bpe.build(TEXTS, interrupted(), 260, tmp_path)
    assert not (tmp_path / "tokens.npy").exists()


def test_it_needs_neither_pytorch_nor_a_profiler(tmp_path, monkeypatch):
    """A module named torch that cannot be imported stands first on its path."""
    (tmp_path / "torch.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), PATHS]))
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/profiler.so")  # the loader would name it on stderr
    seen = []
    real = subprocess.Popen
    monkeypatch.setattr(bpe.subprocess, "Popen", lambda *args, env, **kwargs: seen.append(env) or real(*args, env=env, **kwargs))
    bpe.build(TEXTS, TEXTS, 260, tmp_path)
    assert "LD_PRELOAD" not in seen[0] and Path(tmp_path, "tokens.npy").exists()


def test_what_ends_the_work_is_not_hidden_by_the_pipe_to_the_process_that_it_ends(monkeypatch, tmp_path):
    def texts():
        yield "held back in the pipe's buffer"
        raise UsageError("the text has changed")

    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: (kill(process), process.wait()))
    with pytest.raises(UsageError, match="the text has changed"):
        bpe.build(texts(), [], 300, tmp_path)
