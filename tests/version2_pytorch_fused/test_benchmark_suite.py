"""The benchmark's script: what `available` stands for, and what is kept of a failure."""

import os
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

from common import device as devices
from studies.peers import external_baselines, known_models
from tests.conftest import ROOT
from tracepage.errors import UsageError

import pytest

SCRIPT = ROOT / "version2_pytorch_fused" / "benchmark_suite.py"
CPU = Namespace(device="cpu", use_amp=False, amp_dtype=None)


def test_available_is_all_that_can_run_but_what_is_measured_on_request(monkeypatch, capsys):
    """Of two external baselines one cannot run here; and torch.compile does not work."""

    def refuse(self, *_):
        raise UsageError("absent needs what is not installed here: pip install absent")

    peers = {
        "absent": type("absent", (), {"check": refuse})(),
        "present": type("present", (), {"check": lambda *_: None})(),
    }
    monkeypatch.setattr(external_baselines, "PEERS", peers)
    monkeypatch.setattr(
        devices, "compile_problem", lambda _: "torch.compile does not work here: no compiler"
    )
    files = {
        "v1": Path("v1.py"),
        "v1-compile": Path("v1.py"),
        "absent": None,
        "present": None,
    }
    known = {name: known_models.Model(name, path) for name, path in files.items()}
    known["v1-captured"] = known_models.Model("v1-captured", Path("v1.py"), captured=True)
    known["v1-fp8"] = known_models.Model("v1-fp8", Path("v1.py"), ("--enable-fp8",))
    assert known_models.available(CPU, known) == ["v1", "present"]
    assert capsys.readouterr().out.splitlines() == [
        "leaves out v1-compile: torch.compile does not work here: no compiler",
        "leaves out absent: absent needs what is not installed here: pip install absent",
    ]


@pytest.mark.parametrize(
    ("status", "code", "precisions", "end"),
    [
        ("completed", 1, ("bf16", "fp32"), ""),
        ("interrupted", 130, ("fp32",), ".interrupted"),
    ],
)
def test_what_a_study_that_failed_or_was_stopped_measured_is_kept(
    status, code, precisions, end, tmp_path
):
    """A failed model makes the exit code 1, and the rest goes on; `python` is a stand-in."""
    for folder in ("bin", "results", "version2_pytorch_fused"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(ROOT / "results/measure_versions.sh", tmp_path / "results")
    python = tmp_path / "bin/python"
    write = f"""echo '{{"status": "{status}"}}' >"$2/benchmark.json"; exit {code}"""
    python.write_text(f'#!/bin/sh\nwhile [ "$1" != --output-dir ]; do shift; done\n{write}\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", script, "name", "versions", "tiny:2"],
        env={"PATH": f"{python.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == code
    written = [f"versions_tiny_{precision}.json{end}" for precision in precisions]
    assert sorted(path.name for path in (tmp_path / "results/name").iterdir()) == written


def recorded_studies(tmp_path: Path) -> tuple[Path, Path, str]:
    """The script in a folder of its own; and where a stand-in for `python`, first on this PATH,
    keeps its arguments.
    """
    for folder in ("bin", "results"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(ROOT / "results/measure_versions.sh", tmp_path / "results")
    python = tmp_path / "bin/python"
    log = tmp_path / "arguments"
    keep = f"""echo "$@" >>{log}\nwhile [ "$1" != --output-dir ]; do shift; done"""
    done = """echo '{"status": "completed"}' >"$2/benchmark.json\""""
    python.write_text(f"#!/bin/sh\n{keep}\n{done}\n")
    python.chmod(0o755)
    return script, log, f"{python.parent}:{os.environ['PATH']}"


def test_number_formats_are_measured_in_bf16_alone(tmp_path):
    script, log, path = recorded_studies(tmp_path)
    subprocess.run(["bash", script, "name", "formats", "tiny:2"], env={"PATH": path}, check=True)
    [study] = log.read_text().splitlines()
    assert "--use-amp" in study and "--models v4,v4-fp8 " in f"{study} "
    assert [path.name for path in (tmp_path / "results/name").iterdir()] == [
        "formats_tiny_bf16.json"
    ]


def test_large_steps_are_measured_under_load_in_turns_with_their_deterministic_form(tmp_path):
    """`python` is a stand-in that keeps its arguments."""
    script, log, path = recorded_studies(tmp_path)
    environment = {"PATH": path, "PRECISIONS": "bf16"}
    command = ["bash", script, "name", "determinism", "small:2", "large:2"]
    subprocess.run(command, env={**os.environ, **environment}, check=True)
    small, large = log.read_text().splitlines()
    sustained = "--metrics throughput,memory,energy --load-seconds 10 --timed-seconds 10"
    assert sustained in large and "--load-seconds" not in small
    assert "--models v1,v1-deterministic,v2-captured,v2-captured-deterministic," in large
    written = sorted(path.name for path in (tmp_path / "results/name").iterdir())
    assert written == ["determinism_large_bf16.json", "determinism_small_bf16.json"]
