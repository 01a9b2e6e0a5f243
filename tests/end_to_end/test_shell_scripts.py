"""Every shell script parses."""

import os
import shutil
import subprocess

from tests.conftest import ROOT, finished

import pytest

SHELL_SCRIPTS = sorted(
    path
    for pattern in ("*.sh", "*.sbatch", ".ci/run")
    for path in ROOT.rglob(pattern)
    if not any(part.startswith(".") and part != ".ci" for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shell_script_parses(script):
    shell = "sh" if script.read_text().startswith("#!/bin/sh") else "bash"
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    finished(["shellcheck", "--external-sources", *SHELL_SCRIPTS], ROOT, os.environ)
