"""The runner of a study's jobs: what a signal leaves, and how the process of a job may end."""

import os
import signal
from functools import partial

from common.files import read_json
from common.studies import job_runner
from common.studies.job_runner import Job

import pytest
import torch


def test_a_signal_keeps_the_jobs_that_were_measured_and_starts_no_other(tmp_path):
    """The second job receives it and fails."""
    cells = [{"number": number, "status": "not run", "reason": None} for number in range(3)]

    def run(number: int) -> dict:
        if number == 1:
            signal.raise_signal(signal.SIGTERM)
            return {"status": "failed", "reason": "stopped"}
        return {"status": "ok", "reason": None}

    jobs = [Job(cell, "a job", partial(run, cell["number"]), lambda outcome: None) for cell in cells]
    measured = {"cells": cells}
    code = job_runner.run_all(jobs, measured, tmp_path / "s.json", job_runner.reason)
    assert code == 128 + signal.SIGTERM
    assert [cell["status"] for cell in cells] == ["ok", "not run", "not run"]
    assert read_json(tmp_path / "s.json") == measured and measured["status"] == "interrupted"


def raises(kind: type[Exception], message: str) -> None:
    raise kind(message)


@pytest.mark.parametrize("work, status, reason", [
    (partial(raises, torch.OutOfMemoryError, "CUDA out of memory"), "out of memory", "OutOfMemoryError: CUDA out of memory"),
    (partial(raises, ValueError, "two\n lines"), "failed", "ValueError: two lines"),
    (partial(os._exit, 3), "failed", "exit code 3"),
    (partial(signal.raise_signal, signal.SIGKILL), "out of memory", job_runner.KILLED),
], ids=("memory", "error", "exit", "killed"))  # fmt: skip
def test_the_end_of_a_process_is_a_status(work, status, reason):
    outcome = job_runner.in_a_process(work, "cpu", 900)
    assert (outcome["status"], outcome["reason"]) == (status, reason)


def test_what_the_work_returns_is_found_and_work_that_takes_too_long_is_ended():
    outcome = job_runner.in_a_process(os.getpid, "cpu", 900)
    assert outcome["status"] == "ok" and outcome["found"] != os.getpid() and outcome["device"]["kind"] == "cpu"
    assert job_runner.in_a_process(os.getpid, "cpu", 0.2) == {"status": "timed out", "reason": "not done after 0.2 s"}
