"""The process that trains a BPE and encodes text: what it writes, its memory, and how it fails."""

import os
import random
import subprocess
import sys

from common import bpe
from tests.conftest import PATHS
from tracepage.errors import RunError

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


def test_each_text_is_encoded_by_itself_in_a_process_without_pytorch(tmp_path, monkeypatch):
    """A module named torch that cannot be imported stands first on its path; the loader would name
    the profiler on stderr.
    """
    (tmp_path / "torch.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), PATHS]))
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/profiler.so")
    seen, real = [], subprocess.run
    monkeypatch.setattr(
        bpe.subprocess,
        "run",
        lambda *args, **kwargs: seen.append(real(*args, **kwargs)) or seen[-1],
    )
    (tmp_path / "out").mkdir()
    bpe.build(TEXTS, 260, tmp_path / "out")
    assert seen[0].stderr == b"" and {path.name for path in (tmp_path / "out").iterdir()} == {
        "tokenizer.json",
        "tokens.npy",
    }
    tokenizer, tokens = (
        Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")),
        np.load(tmp_path / "out/tokens.npy"),
    )
    assert tokens.dtype == np.uint32 and tokens.tolist() == [
        token for text in TEXTS for token in tokenizer.encode(text).ids
    ]
    assert (
        tokenizer.decode(tokens.tolist()) == "".join(TEXTS)
        and tokenizer.token_to_id("ab") is not None
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: elsewhere the peak includes what was before"
)
def test_the_memory_of_a_run_is_the_same_with_and_without_a_cache(tmp_path):
    words = random.Random(0).choices([f"{number:x}" for number in range(200_000)], k=500_000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    environment = os.environ | {
        "PYTHONPATH": PATHS,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "-1",
    }

    def peak() -> float:
        command = [sys.executable, "-c", PEAK, str(tmp_path / "text.txt")]
        return float(
            subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=900
            ).stdout
        )

    assert peak() == pytest.approx(peak(), rel=0.05)


def test_what_fails_there_is_a_line(tmp_path):
    with pytest.raises(RunError, match="could not be cut into tokens: .*No such file or directory"):
        bpe.build(TEXTS, 260, tmp_path / "missing")
