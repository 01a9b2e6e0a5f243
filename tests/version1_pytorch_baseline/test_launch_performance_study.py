"""The study of one version: what it writes, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, TINY

import pytest

VERSIONS = sorted(path.parent for path in ROOT.glob("version*_*/tiny_llama_v*.py"))


def run(version: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    command = ["bash", version / "launch_performance_study.sh", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_version_is_trained_and_its_record_shown(version, tmp_path):
    done = run(version, tmp_path, "tiny", "--", *TINY, "--data", "synthetic", "--num-steps", "2")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "performance_study/tiny"
    record = json.loads((folder / "metrics_fp32.json").read_text())
    assert (
        record["status"] == "completed" and record["version"] == version.name[:1] + version.name[7]
    )
    assert "metrics_fp32.json" in (folder / "performance_study.txt").read_text()


def test_an_unknown_argument_is_one_line(tmp_path):
    done = run(VERSIONS[0], tmp_path, "huge")
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: 'huge' is no argument")
        and done.stderr.count("\n") == 1
    )
    assert not any(tmp_path.iterdir())
