"""Progress of work that takes long: one line on stderr after five seconds, and another every five seconds.

Of several processes only the first prints.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common import ranks

SECONDS = 5.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done, and for how long, while the work inside takes more than SECONDS.

    Yields:
        A function that takes how far the work has come, such as "12 % encoded", for the next line.
    """
    done, start, notes = threading.Event(), time.monotonic(), [""]

    def speak() -> None:
        while not done.wait(SECONDS) and ranks.here().main_process:
            print(f"{what}: {time.monotonic() - start:.0f} s{notes[-1]}", file=sys.stderr, flush=True)

    def note(text: str) -> None:
        notes[-1] = f", {text}"

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        done.set()
        thread.join()
