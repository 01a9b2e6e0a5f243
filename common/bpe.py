"""A byte-level BPE and the tokens of a text, made in a process of its own.

On a CPU the peak memory of a training run is that of its process, and this work would be part of it
in the one run that finds no tokens in the cache. The process imports no PyTorch, and a profiler
that is loaded into the run by LD_PRELOAD does not see it.
"""

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import ROOT
from tracepage.errors import RunError

import numpy as np
from tokenizers.implementations import ByteLevelBPETokenizer

# At most so many characters train a BPE; the standard library has about 10 million.
TRAINING_TEXT = 2**26
# Texts; the work takes about 100 bytes for each character that is encoded at once.
ENCODED_AT_ONCE = 8


def build(texts: Sequence[str], vocab_size: int, folder: Path) -> None:
    """Writes tokenizer.json, a BPE of V tokens, and tokens.npy, the tokens of the texts, [N]
    uint32, into `folder`.

    The BPE is trained on the texts, or on every n-th if they are longer than TRAINING_TEXT. Each
    text is encoded by itself. RunError: the process has failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-m", __name__, str(vocab_size), str(folder.resolve())]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=pickle.dumps(texts), capture_output=True
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunError(
            f"the text could not be cut into tokens: {last or f'exit code {done.returncode}'}"
        )


def _encoded(tokenizer: ByteLevelBPETokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        for encoding in tokenizer.encode_batch([*texts[start : start + ENCODED_AT_ONCE]]):
            yield np.array(encoding.ids, dtype=np.uint32)


def main() -> None:
    """Does the work, in a process that `build` has started."""
    vocab_size = int(sys.argv[1])
    folder = Path(sys.argv[2])
    texts = pickle.load(sys.stdin.buffer)
    every = math.ceil(sum(map(len, texts)) / TRAINING_TEXT)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[::every], vocab_size, min_frequency=0, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "tokens.npy", np.concatenate([*_encoded(tokenizer, texts)]))


if __name__ == "__main__":
    main()
