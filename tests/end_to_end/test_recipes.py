"""Recipes for containers and environment modules, and every shell script: as far as they can be checked without these tools."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT, finished

import pytest

CONTAINERFILE = ROOT / "recipes/Containerfile"
MODULEFILE = ROOT / "recipes/modulefiles/tiny-llama"
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


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="there is no shellcheck")
def test_shellcheck_finds_nothing():
    finished(["shellcheck", "--external-sources", *SHELL_SCRIPTS], ROOT, os.environ)


# ----------------------------------------------------------------------------------------------------------- containers


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Containerfile with its arguments, on one line."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_the_containerfile_has_one_base_which_an_argument_replaces_and_runs_shell_and_python():
    names = [name for name, _ in instructions()]
    assert names[:2] == ["ARG", "FROM"] and names.count("FROM") == 1
    assert set(names) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "CMD"}
    (_, default), (_, base) = instructions()[:2]
    assert default.startswith("BASE=docker.io/") and base == "${BASE}"

    runs = [arguments for name, arguments in instructions() if name == "RUN"]
    assert any("sh setup.sh" in run for run in runs)
    for run in runs:
        subprocess.run(["sh", "-n"], input=run, text=True, check=True, capture_output=True)
    [code] = [words[words.index("-c") + 1] for words in map(shlex.split, runs) if "-c" in words]
    compile(code, "Containerfile", "exec")


def test_variables_that_setup_takes_are_arguments_of_the_build():
    arguments = {value.split("=")[0] for name, value in instructions() if name == "ARG"}
    explained = set(re.findall(r"^#   ([A-Z_]+) ", (ROOT / "setup.sh").read_text(), re.MULTILINE))
    assert explained and explained < arguments


def test_no_environment_is_copied_into_a_container():
    """One that was made on the host would be found, and torch's folders named in it are not there."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".venv", ".git"} <= set(ignored)


# --------------------------------------------------------------------------------------------------- environment modules

# Stand-ins for the commands of a modulefile: each prints itself. `mode` is load, unload or whatis.
MODULE_COMMANDS = """
set mode [lindex $argv 1]
set ModulesCurrentModulefile [lindex $argv 0]
foreach name {setenv prepend-path module module-whatis} {
    proc $name {args} "puts \\"$name \\$args\\""
}
proc module-info {what which} { global mode; return [expr {$which eq $mode}] }
foreach once {1} { source $ModulesCurrentModulefile }
"""


def module(clone: Path, mode: str) -> subprocess.CompletedProcess:
    """Runs a clone's modulefile."""
    harness = clone / "harness.tcl"
    harness.write_text(MODULE_COMMANDS)
    path = clone / MODULEFILE.relative_to(ROOT)
    return subprocess.run(["tclsh", str(harness), str(path), mode], capture_output=True, text=True, check=True)


@pytest.fixture
def clone(tmp_path) -> Path:
    """With the modulefile, without an environment."""
    path = tmp_path / "clone" / MODULEFILE.relative_to(ROOT)
    path.parent.mkdir(parents=True)
    shutil.copy(MODULEFILE, path)
    return tmp_path / "clone"


@pytest.mark.skipif(not shutil.which("tclsh"), reason="there is no Tcl")
def test_the_module_puts_the_clones_environment_on_path(clone):
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").touch(mode=0o755)
    path = clone / MODULEFILE.relative_to(ROOT)
    path.write_text(path.read_text().replace("set needed {}", "set needed {rocm/7.2 pytorch}"))
    for mode in ("load", "unload"):
        lines = module(clone, mode).stdout.splitlines()[1:]
        expected = ["module load rocm/7.2", "module load pytorch"]
        assert lines == [*expected, f"setenv VIRTUAL_ENV {clone}/.venv", f"prepend-path PATH {clone}/.venv/bin"]


@pytest.mark.skipif(not shutil.which("tclsh"), reason="there is no Tcl")
def test_a_module_without_an_environment_is_not_loaded(clone):
    done = module(clone, "load")
    assert "setenv" not in done.stdout and "run `make setup` there first" in done.stderr
    assert "setenv" in module(clone, "unload").stdout
