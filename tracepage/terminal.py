"""How text is shown: how wide a line may be, numbers and times, and progress.

Work that takes long says so on a line of stderr after five seconds, and again every five seconds;
of several processes only the first does.
"""

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LEAST = 80  # columns
MOST = 120
SECONDS = 5.0  # between two lines of progress


def width() -> int:
    """Columns of the terminal, within bounds; the most where the output is a file or a pipe."""
    return max(LEAST, min(MOST, shutil.get_terminal_size((MOST, 0)).columns))


def wrapped(line: str, indent: int = 0) -> str:
    """The line in as many as it takes, those after the first indented; words are not cut."""
    return textwrap.fill(
        line,
        width(),
        subsequent_indent="".ljust(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(number: int, noun: str) -> str:
    """ "1 kernel", "2,345 kernels"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(text: str, width: int) -> str:
    """At most `width` characters: what is too long loses its middle."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 3
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


class Line:
    """A line of progress. On a terminal each text takes the place of the one before, elsewhere each
    is a line of its own.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.shown = False
        self.terminal = bool(stream and stream.isatty()) and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        """The cursor stays at the start of the line, so that other output covers it."""
        if self.terminal:
            text = f"\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
            self.shown = True
        print(text, end="\r" if self.terminal else "\n", file=self.stream, flush=True)

    def end(self) -> None:
        """Keeps the last text."""
        if self.shown:
            print(file=self.stream, flush=True)
        self.shown = False


def duration(seconds: float) -> str:
    """ "46 s", "12 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def progress(work: str) -> Iterator[None]:
    """Says which work is done, and for how long, after SECONDS."""
    done = threading.Event()
    start = time.monotonic()
    line = Line(sys.stderr)
    first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun started

    def speak() -> None:
        while not done.wait(SECONDS) and first:
            line.show(f"{work}: {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        line.end()


def format_number(value: object) -> str:
    """A number with three significant digits, whole from 100 on, with thousands separators; text as
    it is; None as "".
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def time_unit(ms: float) -> tuple[str, float]:
    """The unit in which a person reads a time, us below 1 ms and s from 1,000 ms on, and how many
    of it a millisecond is.

    A column of times takes one unit, that of its largest value.
    """
    if abs(ms) < 1:
        return "us", 1e3
    return ("ms", 1.0) if abs(ms) < 1000 else ("s", 1e-3)


def format_time(ms: float) -> str:
    """A time with its unit, such as "812 us", "12.3 ms" or "4.56 s"."""
    unit, factor = time_unit(ms)
    return f"{format_number(float(ms * factor))} {unit}"
