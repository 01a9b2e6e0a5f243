"""A byte-level BPE and the tokens of a text, made in a process of its own.

On a CPU the peak memory of a training run is that of its process. The memory that this work takes, about 100 bytes for each
character that is encoded at once, would be part of it in the one run that finds no tokens in the cache. The process imports no
PyTorch, and a profiler that is loaded into the run by LD_PRELOAD does not see it.

Standard input holds two sequences of pickled texts, the ones to train on and the ones to encode; None ends a sequence.
"""

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from common import ROOT
from common.errors import RunError

import numpy as np
from tokenizers import Tokenizer
from tokenizers.implementations import ByteLevelBPETokenizer

FILES = ("tokenizer.json", "tokens.npy")
ENCODED_AT_ONCE = 8  # texts, of which a long one has about 2^18 characters


def build(training: Iterable[str], texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Writes FILES into `folder`: a BPE of V tokens trained on `training`, and the tokens of `texts`, [N] uint32.

    Each text is encoded by itself, and none is held once it has been passed on. RunError: the process has failed.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"PYTHONPATH": paths}
    command = [sys.executable, "-m", __name__, str(vocab_size), str(folder.resolve())]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        try:
            for text in itertools.chain(training, [None], texts, [None]):
                pickle.dump(text, process.stdin)
        except BrokenPipeError:  # it has ended, and says why
            pass
        except BaseException:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # in place of what ends the work here
                process.stdin.close()
            raise
        _, said = process.communicate()
    if process.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunError(f"the text could not be cut into tokens: {last or f'exit code {process.returncode}'}")


def main() -> None:
    """Does the work, in a process that `build` has started."""
    vocab_size, folder, stream = int(sys.argv[1]), Path(sys.argv[2]), sys.stdin.buffer
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(_sequence(stream), vocab_size, min_frequency=0, show_progress=False)
    trained.save(str(folder / "tokenizer.json"))
    tokenizer, texts, count = Tokenizer.from_file(str(folder / "tokenizer.json")), _sequence(stream), 0
    with (folder / "tokens.npy").open("wb") as file:
        header = {"descr": "<u4", "fortran_order": False, "shape": (0,)}  # of an array [N]; N is known at the end
        np.lib.format.write_array_header_1_0(file, header)
        while batch := list(itertools.islice(texts, ENCODED_AT_ONCE)):
            for encoding in tokenizer.encode_batch_fast(batch):
                count += len(encoding.ids)
                file.write(np.array(encoding.ids, dtype="<u4").tobytes())
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})  # as long as the first: NumPy leaves room


def _sequence(stream: BinaryIO) -> Iterator[str]:
    return iter(lambda: pickle.load(stream), None)


if __name__ == "__main__":
    main()
