"""Progress of work that takes long: one line on stderr after five seconds, and another every five seconds.

On a terminal each takes the place of the one before. Of several processes only the first prints.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.terminal import Line

SECONDS = 5.0


def duration(seconds: float) -> str:
    """ "46 s", "12 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Says what is done, and for how long, after SECONDS; yields a function that takes how far it has come ("12% encoded")."""
    done, start, notes, line = threading.Event(), time.monotonic(), [""], Line(sys.stderr)

    def speak() -> None:
        while not done.wait(SECONDS) and os.environ.get("RANK", "0") == "0":  # `ranks.here` may refuse the environment
            line.show(f"{what}: {time.monotonic() - start:.0f} s{notes[-1]}")

    def note(text: str) -> None:
        notes[-1] = f", {text}"

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        done.set()
        thread.join()
        line.end()
