"""--validate-setup: the facts before a run, and the check of its files after it."""

import json

from common.training import ending
from tests.conftest import TINY, V1

import pytest


@pytest.mark.usefixtures("known_ceilings")
def test_the_facts_and_a_check_that_reads_every_file(execute):
    flags = ("--data", "synthetic", "--num-steps", "4", "--enable-pytorch-profiler", "--validate-setup")
    printed = execute(V1 / "tiny_llama_v1.py", *TINY, *flags).out
    for fact in ("python", "torch", "triton", "deepspeed", "device", "data"):
        assert f"\n  {fact} " in printed, fact
    assert "setup ok: " in printed and "operators" in printed.splitlines()[-1]


@pytest.mark.parametrize("same", [True, False], ids=["the same flags", "other flags"])
def test_a_run_at_the_same_time_has_overwritten_the_record(execute, monkeypatch, same):
    """A run with the same flags has the same losses, but times of its own."""

    def another(run):
        measured = json.loads(run.metrics.read_text())
        (measured["step_ms"] if same else measured["loss"])["all"][0] += 1
        run.metrics.write_text(json.dumps(measured))
        check(run)

    check = ending._check_files
    monkeypatch.setattr(ending, "_check_files", another)
    said = execute(V1 / "tiny_llama_v1.py", *TINY, "--data", "synthetic", "--num-steps", "2", "--validate-setup", check=1).err
    assert "error: metrics_v1.json is now another run's" in said and "--metrics-out" in said
