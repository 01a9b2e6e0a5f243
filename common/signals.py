"""Ends a command at a signal: after the work in hand, and after all measurements were written.

SIGINT is Ctrl-C, SIGTERM comes from a batch system, SIGHUP from a terminal that closes. Python
turns only the first one into an exception; here all three become one, so that every command cleans
up and ends with exit code 128 + n.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal, whose number is the argument, ends the command."""


def number(stop: KeyboardInterrupt) -> int:
    """The signal behind the exception: Python's own handler of Ctrl-C raises a plain
    KeyboardInterrupt.
    """
    return stop.args[0] if stop.args else signal.SIGINT


@contextmanager
def raised() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise Stopped. A signal that is ignored (nohup) or that has a
    handler keeps it.
    """

    def stop(kind: int, frame: object) -> None:
        raise Stopped(kind)

    with _handled(stop, [kind for kind in ENDING if signal.getsignal(kind) == signal.SIG_DFL]):
        yield


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Within it, the first signal is only noted in the list, so that the work in hand can end; a
    second one raises Stopped.
    """
    received: list[int] = []

    def note(kind: int, frame: object) -> None:
        received.append(kind)
        if len(received) > 1:
            raise Stopped(kind)

    with _handled(note, _not_ignored()):
        yield received


@contextmanager
def postponed() -> Iterator[None]:
    """A signal within it takes effect at its end: for work that must not be cut short, such as
    writing a record.
    """
    received: list[int] = []
    with _handled(lambda kind, frame: received.append(kind), _not_ignored()):
        yield
    if received:
        signal.raise_signal(received[0])


@contextmanager
def immediate() -> Iterator[None]:
    """A signal within it ends the process at once: C++ that waits for another process runs no
    handler of Python's.
    """
    with _handled(signal.SIG_DFL, _not_ignored()):
        yield


def _not_ignored() -> list[int]:
    """A shell's background job ignores Ctrl-C but may be sent SIGINT by name; what nohup ignores
    stays ignored.
    """
    return [
        kind for kind in ENDING if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN
    ]


@contextmanager
def _handled(
    handler: Callable[[int, object], object] | signal.Handlers, kinds: list[int]
) -> Iterator[None]:
    """A handler that was not installed from Python, as rocprofv3's is, can't be put back: then the
    signal ends the process.
    """
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, old in before.items():
            signal.signal(kind, signal.SIG_DFL if old is None else old)
