"""The benchmark's script: what `available` stands for, the guard on the ordering, and what is kept of a failure."""

import importlib
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from common import device as devices
from common.errors import UsageError
from common.studies import external_baselines, known_models
from tests import records
from tests.conftest import ROOT

import pytest

SCRIPT = ROOT / "version2_pytorch_fused" / "benchmark_suite.py"
CPU = Namespace(device="cpu", use_amp=False, amp_dtype=None)


def test_available_is_all_that_can_run_but_what_is_measured_on_request(monkeypatch, capsys):
    """Of two external baselines one cannot run here; and torch.compile does not work."""

    def refuse(self, *_):
        raise UsageError("absent needs what is not installed here: pip install absent")

    peers = {"absent": type("absent", (), {"check": refuse})(), "present": type("present", (), {"check": lambda *_: None})()}
    monkeypatch.setattr(external_baselines, "PEERS", peers)
    monkeypatch.setattr(devices, "compile_problem", lambda _: "torch.compile does not work here: no compiler")
    files = {"v1": Path("v1.py"), "v1-compile": Path("v1.py"), "absent": None, "present": None, "v1-fp8": Path("v1.py")}
    known = {name: known_models.Model(name, path) for name, path in files.items()}
    known |= {"present-tuned": known_models.Model("present-tuned")}
    known |= {"v1-captured": known_models.Model("v1-captured", Path("v1.py"), captured=True)}
    assert known_models.available(CPU, known) == ["v1", "present"]
    assert capsys.readouterr().out.splitlines() == [
        "leaves out v1-compile: torch.compile does not work here: no compiler",
        "leaves out absent: absent needs what is not installed here: pip install absent",
    ]


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """suite(*flags, ms=..., code=0): the exit code of the script where `measure` writes these times and returns that code."""
    script = importlib.import_module("version2_pytorch_fused.benchmark_suite")

    def run(*flags: str, ms: dict, code: int = 0) -> int:
        def measure(arguments, models, shapes, baseline, path):
            records.peers(path, **ms)
            return code

        monkeypatch.setattr(script.benchmark, "measure", measure)
        monkeypatch.setattr(sys, "argv", ["benchmark_suite.py", "--device", "cpu", *flags])
        return script.main()

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize("code, expected", ((0, 1), (1, 1), (130, 130)))
def test_the_guard_names_the_faster_model_in_one_line(suite, capsys, code, expected):
    assert suite("--fastest", "v2", ms={"v1": 2.0, "v2": 1.0}, code=code) == code
    assert not capsys.readouterr().err
    assert suite("--fastest", "v2", ms={"v1": 0.5, "v2": 1.0}, code=code) == expected
    assert capsys.readouterr().err == "v2 is not the fastest: v1, B 8, S 128 takes 500 us, v2 1 ms\n"
    assert suite(ms={"v1": 0.5, "v2": 1.0}) == 0


def test_a_guard_that_could_not_fail_is_refused(refused):
    said = refused(SCRIPT, "--device", "cpu", "--fastest", "v2", "--metrics", "accuracy")
    assert "needs it among --models, and throughput or memory among --metrics" in said


@pytest.mark.parametrize(("status", "code", "precisions", "end"), [
    ("completed", 1, ("bf16", "fp32"), ""), ("interrupted", 130, ("fp32",), ".interrupted"),
])  # fmt: skip
def test_what_a_study_that_failed_or_was_stopped_measured_is_kept(status, code, precisions, end, tmp_path):
    """A failed model makes the exit code 1, and the rest goes on; `python` is a stand-in."""
    for folder in ("bin", "results", "version2_pytorch_fused"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(ROOT / "results/measure_versions.sh", tmp_path / "results")
    python = tmp_path / "bin/python"
    write = f"""echo '{{"status": "{status}"}}' >"$2/benchmark.json"; exit {code}"""
    python.write_text(f'#!/bin/sh\nwhile [ "$1" != --output-dir ]; do shift; done\n{write}\n')
    python.chmod(0o755)
    path = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", script, "name", "peers", "tiny:2"], env={**os.environ, "PATH": path})
    assert done.returncode == code
    written = [f"peers_tiny_{precision}.json{end}" for precision in precisions]
    assert sorted(path.name for path in (tmp_path / "results/name").iterdir()) == written
