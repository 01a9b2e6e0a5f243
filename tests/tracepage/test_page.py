"""The page of anyone's trace needs no PyTorch, from the clone and from an installed package."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests import branched_traces
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES, STATS, put, write_gpu_trace
from tests.rank_files import write_late
from tests.snapshot_files import step_content, write_snapshot
from tracepage import page
from tracepage.errors import UsageError

import pytest

WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def run_without_torch(tmp_path):
    """Runs this Python in an empty folder, where torch cannot be imported."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(WITHOUT_TORCH)
    (tmp_path / "empty").mkdir()

    def run(*arguments: Path | str, path: Path = ROOT) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'blocked'}{os.pathsep}{path}"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path / "empty",
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


def test_the_page_of_a_trace_needs_no_torch(tmp_path, run_without_torch):
    trace, other = (write_gpu_trace(tmp_path / name) for name in ("trace.json", "other.json"))
    written = tmp_path / "empty/run.html"
    for paths in (
        (trace,),
        (trace, other),
        (FIXTURES / "ncu_raw.csv",),
        (ROOT / "results/h200/v1_tiny_profile.json.gz",),
    ):
        written.unlink(missing_ok=True)
        done = run_without_torch(ROOT / "page.py", *paths)
        assert (done.returncode, done.stdout, done.stderr) == (0, "written: run.html\n", "")
        assert "<html" in written.read_text()
    done = run_without_torch(ROOT / "page.py", ROOT / "README.md")
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    )


def test_the_suffix_chooses_page_text_or_json_and_others_are_refused(tmp_path, monkeypatch, capsys):
    trace = write_gpu_trace(tmp_path / "trace.json")
    for name, begin in (("a.html", "<!doctype html>"), ("a.md", "# trace.json"), ("a.json", "{")):
        monkeypatch.setattr(
            sys, "argv", ["tracepage", str(trace), "--output", str(tmp_path / name)]
        )
        page.main()
        assert (tmp_path / name).read_text().lstrip().startswith(begin)
    monkeypatch.setattr(sys, "argv", ["tracepage", str(trace), "--output", str(tmp_path / "a.txt")])
    with pytest.raises(SystemExit) as ended:
        page.command()
    assert ended.value.code == 2
    assert "a.txt: name a .html, .md or .json file" in capsys.readouterr().err
    assert not (tmp_path / "a.txt").exists()


def test_the_wheel_holds_tracepage_alone_and_its_command(tmp_path, run_without_torch):
    """Built without a network, and unpacked in place of an installation."""
    pytest.importorskip("setuptools", minversion="77")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "tracepage", clone / "tracepage")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    [metadata] = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"tracepage", metadata.name}
    entry = (metadata / "entry_points.txt").read_text()
    assert entry == "[console_scripts]\ntracepage = tracepage.page:command\n"

    command = "from tracepage import page; print(page.__file__); page.command()"
    traces = [write_gpu_trace(tmp_path / name) for name in ("trace.json", "other.json")]
    for paths in (traces[:1], traces):
        done = run_without_torch("-c", command, *paths, "--output", "a.html", path=installed)
        assert done.stdout == f"{installed / 'tracepage/page.py'}\nwritten: a.html\n", done.stderr
        assert "<html" in (tmp_path / "empty/a.html").read_text()


@pytest.mark.slow
def test_an_installed_package_has_the_command(tmp_path):
    """`pip install .` without extras, not editable, in an environment of its own."""
    venv.create(tmp_path / "venv", with_pip=True)
    shutil.copytree(
        ROOT,
        tmp_path / "clone",
        ignore=shutil.ignore_patterns(".*", "results", "build", "*.egg-info"),
    )
    install = [tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", tmp_path / "clone"]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"needs a package index: {installed.stderr.strip().splitlines()[-1]}")
    trace = tmp_path / "trace.json"
    trace.write_text(
        json.dumps([{"ph": "X", "name": "work", "pid": 1, "tid": 1, "ts": 0, "dur": 5}])
    )
    for path in (trace, write_gpu_trace(tmp_path / "gpu.json")):
        subprocess.run([tmp_path / "venv/bin/tracepage", path], cwd=tmp_path, check=True)
        assert "<html" in (tmp_path / "run.html").read_text()
    python = [tmp_path / "venv/bin/python", "-c", "import common"]
    imported = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'common'" in imported.stderr


def test_a_folder_of_another_profiler_gives_the_page_of_its_kernels(tmp_path, monkeypatch):
    put(tmp_path / "results.stats.csv", STATS)
    put(tmp_path / "results.copy_stats.csv", STATS.replace("void scale", "CopyHostToDevice"))
    output = tmp_path / "run.html"
    monkeypatch.setattr(sys, "argv", ["page.py", str(tmp_path), "--output", str(output)])
    page.main()
    assert "results.stats.csv" in output.read_text()


@pytest.mark.parametrize("by_folder", [True, False])
def test_a_folder_of_ranks_or_their_files_give_one_page(tmp_path, monkeypatch, by_folder):
    (tmp_path / "ranks").mkdir()
    paths = write_late(tmp_path / "ranks")
    names = [str(tmp_path / "ranks")] if by_folder else list(map(str, paths))
    for suffix, begin in ((".html", "<!doctype html>"), (".md", "# 2 ranks"), (".json", "{")):
        output = tmp_path / f"all{suffix}"
        monkeypatch.setattr(sys, "argv", ["tracepage", *names, "--output", str(output)])
        page.main()
        text = output.read_text().lstrip()
        assert text.startswith(begin) and "Rank 1 is slow" in text


def test_a_memory_snapshot_or_two_give_a_page(tmp_path, monkeypatch):
    path = write_snapshot(tmp_path / "a.pickle", step_content())
    for names in ([str(path)], [str(path), str(path)]):
        for suffix in page.KINDS:
            output = tmp_path / f"memory{suffix}"
            monkeypatch.setattr(sys, "argv", ["tracepage", *names, "--output", str(output)])
            page.main()
            assert "The peak is 70 MiB" in output.read_text()
    with pytest.raises(UsageError, match="give one memory snapshot, or two to compare"):
        monkeypatch.setattr(sys, "argv", ["tracepage", *[str(path)] * 3])
        page.main()


def test_a_captured_step_of_any_program_takes_its_operators_from_another_trace(
    tmp_path, monkeypatch
):
    branched_traces.write(tmp_path, captured=True)
    eager = (tmp_path / "eager_trace_1.json").rename(tmp_path / "by_hand.json")
    arguments = [str(tmp_path / "trace_1.json"), "--capture", str(eager)]
    output = tmp_path / "page/a.html"
    monkeypatch.setattr(sys, "argv", ["tracepage", *arguments, "--output", str(output)])
    page.main()
    assert "Time of the step by span" in output.read_text()
    monkeypatch.setattr(sys, "argv", ["tracepage", str(eager), *arguments])
    with pytest.raises(UsageError, match="--capture explains one trace"):
        page.main()
    table = put(tmp_path / "results.stats.csv", STATS)
    monkeypatch.setattr(sys, "argv", ["tracepage", str(table), *arguments[1:]])
    monkeypatch.chdir(output.parent)
    with pytest.raises(UsageError, match="stats.csv is not a trace of torch.profiler"):
        page.main()
