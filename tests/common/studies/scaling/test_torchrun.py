"""A torchrun job: its end is a status, and it does not outlast its time."""

from common.studies.scaling import torchrun
from tests import study_options

import pytest


@pytest.mark.parametrize("code, said, status, reason", [
    (None, "", "timed out", "not done after 900 s"),
    (1, "step 1\nerror: rank 1: out of memory: lower\nSignal 15", "out of memory", "rank 1: out of memory: lower"),
    (1, "exitcode  : -9 (pid: 7)\nlast", "out of memory", "killed by the system (SIGKILL)"),
    (1, "error: no such thing\nTraceback\nexitcode : 1", "failed", "no such thing"),
    (3, "", "failed", "exit code 3"),
], ids=["time", "memory", "killed", "error", "silent"])  # fmt: skip
def test_the_end_of_a_job_is_a_status(code, said, status, reason):
    found = torchrun.ending(code, said, study_options.scaling())
    assert found["status"] == status and found["reason"].startswith(reason)


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    script = tmp_path / "late.py"
    script.write_text("import time\ntime.sleep(600)")
    assert torchrun.run(1, [str(script)], study_options.scaling(timeout=0.5), tmp_path) == (None, "")
