"""Signals: raised as an exception, deferred to the end of the work in hand, or postponed to the end
of a block.
"""

import os
import signal
from collections.abc import Iterator

from common import signals

import pytest


@pytest.fixture(autouse=True)
def ordinary_handlers() -> Iterator[None]:
    """Those of a process that was started from a terminal."""
    ordinary = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {kind: signal.signal(kind, handler) for kind, handler in ordinary.items()}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


def send(kind: int) -> None:
    os.kill(os.getpid(), kind)


@pytest.mark.parametrize("kind", signals.ENDING)
def test_a_signal_is_an_exception(kind):
    with pytest.raises(KeyboardInterrupt) as ended, signals.raised():
        send(kind)
    assert (
        signals.number(ended.value) == kind and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.raised(), signals.postponed(), signals.deferred() as received:
        send(signal.SIGHUP)
    assert received == []
    with signals.deferred():
        noting = signal.getsignal(signal.SIGTERM)
        with signals.raised():
            assert signal.getsignal(signal.SIGTERM) == noting, "and what has a handler keeps it"


@pytest.mark.parametrize("kind", signals.ENDING)
def test_the_first_signal_is_noted_and_the_second_raised(kind):
    with pytest.raises(signals.Stopped) as ended, signals.deferred() as received:
        send(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        send(kind)
    assert signals.number(ended.value) == kind


def test_a_postponed_signal_takes_effect_at_the_end():
    done = []
    with pytest.raises(signals.Stopped) as ended, signals.raised():
        with signals.postponed():
            send(signal.SIGTERM)
            send(signal.SIGHUP)
            done.append("the work")
        done.append("what follows")
    assert done == ["the work"] and signals.number(ended.value) == signal.SIGTERM, (
        "the first one's exit code"
    )


def test_an_error_in_the_work_is_not_replaced_by_the_signal():
    with pytest.raises(OSError), signals.raised(), signals.postponed():
        send(signal.SIGTERM)
        raise OSError


def test_handlers_that_were_there_before_python_are_no_obstacle(monkeypatch):
    """rocprofv3 installs its own in C; of those Python says None, and cannot put them back."""
    real = signal.signal
    with monkeypatch.context() as patch:
        patch.setattr(signals.signal, "signal", lambda kind, handler: real(kind, handler) and None)
        with signals.deferred() as received:
            send(signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
