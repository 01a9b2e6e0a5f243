"""The runner of a study's jobs: GPUs of their own, and what a signal leaves."""

import signal
import threading
import time

from common.files import read_json
from common.studies import job_runner
from common.studies.job_runner import Job

import pytest
import torch


def test_gpus_are_named_as_the_environment_has_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,4,2")
    assert job_runner.visible_gpus(1) == [None] and job_runner.visible_gpus(2) == ["7", "4"]
    assert job_runner.environment(None)["CUDA_VISIBLE_DEVICES"] == "7,4,2"
    assert job_runner.environment("4")["CUDA_VISIBLE_DEVICES"] == "4"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert job_runner.visible_gpus(3) == ["0", "1", "2"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "5,3")  # which HIP reads, whatever CUDA_VISIBLE_DEVICES is
    assert job_runner.visible_gpus(2) == ["5", "3"] and job_runner.environment("3")["HIP_VISIBLE_DEVICES"] == "3"


def test_a_signal_keeps_the_jobs_that_were_measured(tmp_path):
    """The second job receives it and fails; the first ends after it, and the third would begin after the others."""
    cells = [{"number": number, "status": "not run", "reason": None} for number in range(3)]
    received, arrived = [], threading.Event()

    def run(number: int, gpu: str | None) -> dict:
        if number == 0:
            assert arrived.wait(300)
            return {"status": "ok", "reason": None}
        received.append(signal.SIGTERM)
        arrived.set()
        return {"status": "failed", "reason": "stopped"}

    jobs = [Job(cell, "a job", lambda gpu, number=cell["number"]: run(number, gpu)) for cell in cells]
    measured = {"cells": cells}
    code = job_runner.run_all([(jobs, ["0", "1"])], measured, tmp_path / "s.json", received, lambda *_: None, job_runner.reason)
    assert code == 128 + signal.SIGTERM and received == [signal.SIGTERM]
    assert [cell["status"] for cell in cells] == ["ok", "not run", "not run"]
    assert read_json(tmp_path / "s.json") == measured and measured["status"] == "interrupted"


def test_no_job_starts_once_the_study_has_failed():
    """A second signal and a full disk raise in the loop over the results."""
    started = []

    def run(job: int, place: str | None) -> None:
        started.append(job)
        time.sleep(0.3 * job)

    with pytest.raises(OSError, match="full"), job_runner.side_by_side([0, *[1] * 9], run, ["0", "1"]) as results:
        next(results)
        raise OSError("full")
    assert len(started) < 10
