"""A word from work that takes long: one line on stderr after five seconds, and another every five seconds."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 5.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says what is being done, and for how long, while the work inside takes more than SECONDS."""
    done, start = threading.Event(), time.monotonic()

    def speak() -> None:
        while not done.wait(SECONDS):
            print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
