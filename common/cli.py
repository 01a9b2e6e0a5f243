"""How a command of the workshop begins and ends: its flags, the signals that end it, its exit code.

SIGINT is Ctrl-C, SIGTERM comes from a batch system, SIGHUP from a terminal that closes. Python
turns only the first one into an exception; here all three become one, so that every command cleans
up and ends with exit code 128 + n.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from common import ROOT
from tracepage.command_line import exit_code, parse, parse_known, require  # noqa: F401

PACKAGES = "jinja2 matplotlib numpy pandas pydantic safetensors tokenizers torch yaml"
require(PACKAGES.split(), f"run `make setup` in {ROOT}, then `source {ROOT}/.venv/bin/activate`")

from common import ranks
from common.options import (  # noqa: F401  # scripts take these from here
    Kind,
    add,
    add_model_flags,
    add_output_dir,
    add_profiling_flags,
    add_switches,
    add_training_flags,
    amount,
    positive,
    positive_list,
    resolve,
    switches,
)
from tracepage.errors import RunError, UsageError

GRACE = 1.0  # seconds
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a script's main function and exits, with the exit codes of `exit_code`."""
    with signals_raised():
        code = exit_code(main, _end_of_a_rank)
    # Before Python 3.14, a thread of gloo that gives a tensor back after Python's end aborts the
    # process.
    if ranks.gloo_started:
        os._exit(code)
    sys.exit(code)


def _end_of_a_rank(error: UsageError | RunError) -> None:
    """Prints the error. Of several processes each names its rank, unless all end alike.

    Where the first of all, or of a node, may say the same, the others wait for GRACE seconds:
    torchrun ends them meanwhile.
    """
    rank = ranks.here()
    if (rank.rank and error.shared) or (rank.local_rank and isinstance(error, UsageError)):
        try:
            time.sleep(GRACE)
        except KeyboardInterrupt:  # torchrun's signal; the exit code stays that of the error.
            return
    if rank.main_process or not error.shared:
        alone = error.shared or rank.world_size == 1
        prefix = "" if alone else f"rank {rank.rank}: "
        print(f"error: {prefix}{error}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------- signals


class Stopped(KeyboardInterrupt):
    """A signal, whose number is the argument, ends the command."""


def signal_number(stop: KeyboardInterrupt) -> int:
    """The signal's number: Python's own handler of Ctrl-C raises a plain KeyboardInterrupt."""
    return stop.args[0] if stop.args else signal.SIGINT


@contextmanager
def signals_raised() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise Stopped. A signal that is ignored (nohup) or that has a
    handler keeps it.
    """

    def stop(kind: int, frame: object) -> None:
        raise Stopped(kind)

    with _handled(stop, [kind for kind in ENDING if signal.getsignal(kind) == signal.SIG_DFL]):
        yield


@contextmanager
def signals_deferred() -> Iterator[list[int]]:
    """Within it, the first signal is only noted in the list; a second one raises Stopped."""
    received: list[int] = []

    def note(kind: int, frame: object) -> None:
        received.append(kind)
        if len(received) > 1:
            raise Stopped(kind)

    with _handled(note, _not_ignored()):
        yield received


@contextmanager
def signals_postponed() -> Iterator[None]:
    """A signal within it takes effect at its end, after work that must not be cut short."""
    received: list[int] = []
    with _handled(lambda kind, frame: received.append(kind), _not_ignored()):
        yield
    if received:
        signal.raise_signal(received[0])


@contextmanager
def signals_immediate() -> Iterator[None]:
    """A signal within it ends the process at once: waiting C++ runs no handler of Python's."""
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
