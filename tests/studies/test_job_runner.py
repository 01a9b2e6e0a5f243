"""How the process of a study's job may end."""

import os
import signal
from functools import partial

from studies import job_runner

import pytest
import torch


def raises(kind: type[Exception], message: str) -> None:
    raise kind(message)


@pytest.mark.parametrize(
    "work, status, reason",
    [
        (
            partial(raises, torch.OutOfMemoryError, "CUDA out of memory"),
            "out of memory",
            "OutOfMemoryError: CUDA out of memory",
        ),
        (partial(raises, ValueError, "two\n lines"), "failed", "ValueError: two lines"),
        (partial(os._exit, 3), "failed", "exit code 3"),
        (partial(signal.raise_signal, signal.SIGKILL), "out of memory", job_runner.KILLED),
    ],
    ids=("memory", "error", "exit", "killed"),
)
def test_the_end_of_a_process_is_a_status(work, status, reason):
    outcome = job_runner.in_a_process(work, "cpu", 900)
    assert (outcome["status"], outcome["reason"]) == (status, reason)


def test_what_the_work_returns_is_found_and_work_that_takes_too_long_is_ended():
    outcome = job_runner.in_a_process(os.getpid, "cpu", 900)
    assert (
        outcome["status"] == "ok"
        and outcome["found"] != os.getpid()
        and outcome["device"]["kind"] == "cpu"
    )
    assert job_runner.in_a_process(os.getpid, "cpu", 0.2) == {
        "status": "timed out",
        "reason": "not done after 0.2 s",
    }
