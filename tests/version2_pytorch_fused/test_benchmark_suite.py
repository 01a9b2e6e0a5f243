"""The benchmark's script: what `available` and `preset` stand for, the page, and the guard on the ordering."""

import importlib
import sys
from argparse import Namespace
from pathlib import Path

from common import device as devices
from common.errors import UsageError
from common.files import read_json, write_json
from common.studies import external_baselines, known_models
from common.studies.benchmark import benchmark_results
from tests import records
from tests.conftest import ROOT

import pytest

SCRIPT = ROOT / "version2_pytorch_fused" / "benchmark_suite.py"
CPU = Namespace(device="cpu", use_amp=False, amp_dtype=None)


@pytest.fixture
def peers(monkeypatch) -> None:
    """Two external baselines, of which `absent` cannot run here; and torch.compile does not work."""

    def check(name):
        def checked(self, *_):
            if name == "absent":
                raise UsageError("absent needs what is not installed here: pip install absent")

        return checked

    found = {name: type(name, (), {"check": check(name), "packages": {}})() for name in ("absent", "present")}
    monkeypatch.setattr(external_baselines, "PEERS", found)
    monkeypatch.setattr(devices, "compile_problem", lambda _: "torch.compile does not work here: no compiler")


def test_available_is_all_that_can_run_but_what_is_measured_on_request(peers, capsys):
    known = {
        model.name: model
        for model in (
            known_models.Model("v1", Path("v1.py")),
            known_models.Model("v1-compile", Path("v1.py")),
            known_models.Model("absent"),
            known_models.Model("present"),
            known_models.Model("v1-captured", Path("v1.py"), captured=True),
            known_models.Model("v1-fp8", Path("v1.py")),
            known_models.Model("present-tuned"),
        )
    }
    assert known_models.available(CPU, known) == ["v1", "present"]
    assert capsys.readouterr().out.splitlines() == [
        "leaves out v1-compile: torch.compile does not work here: no compiler",
        "leaves out absent: absent needs what is not installed here: pip install absent",
    ]


def measured(ms: dict[str, tuple[float | None, float | None]]) -> dict:
    """benchmark.json of models with these medians at S 8 and S 16; None: out of memory."""
    cells = []
    for i, length in enumerate((8, 16)):
        for model, times in ms.items():
            step = {"median": times[i], "p20": 0.1, "p80": 9.0, "count": 5}
            run = {"step_ms": step, "kind": "GPU allocator", "peak_mib": 5.0}
            outcome = {"status": "ok", "reason": None, "runs": [run]}
            if times[i] is None:
                outcome = {"status": "out of memory", "reason": "CUDA", "runs": []}
            cells.append({"model": model, "batch_size": 4, "sequence_length": length} | outcome)
    return records.benchmark(cells, metrics=["throughput"])


@pytest.mark.parametrize("ms, expected", [
    ({"v1": (2.0, 4.0), "v4": (1.0, 2.0)}, []),
    ({"v1": (1.0, 2.0), "v4": (1.0, 2.0)}, []),
    ({"v1": (2.0, 1.5), "hf": (3.0, 1.0), "v4": (1.0, 2.0)}, ["hf, B 4, S 16 takes 1 ms, v4 2 ms"]),
    ({"v4-fp8": (0.5, 1.0), "v4": (1.0, 2.0)}, []),
    ({"v1": (None, None), "v4": (1.0, 2.0)}, []),
    ({"v1": (None, 1.0), "v4": (None, None)}, ["v4, B 4, S 8: out of memory", "v4, B 4, S 16: out of memory"]),
], ids=("fastest", "equal", "beaten once", "another format", "others out of memory", "itself out of memory"))  # fmt: skip
def test_who_is_ahead_of_a_model(ms, expected):
    assert benchmark_results.ahead(measured(ms), "v4") == expected


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """suite(*flags, ms=..., code=0): the exit code of the script where `measure` writes these times and returns that code."""
    script = importlib.import_module("version2_pytorch_fused.benchmark_suite")

    def run(*flags: str, ms: dict, code: int = 0) -> int:
        def measure(models, shapes, baseline, path):
            shown = {"shapes": [[shape.batch_size, shape.seq_len] for shape in shapes]}
            write_json(path, measured(ms) | shown | {"planned": [model.name for model in models]})
            return code

        monkeypatch.setattr(script.benchmark_cells, "measure", measure)
        monkeypatch.setattr(sys, "argv", ["benchmark_suite.py", "--device", "cpu", *flags])
        return script.main()

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize("code, expected", ((0, 1), (1, 1), (130, 130)))
def test_the_guard_names_the_faster_model_in_one_line(suite, capsys, code, expected):
    assert suite("--fastest", "v2", ms={"v1": (2.0, 4.0), "v2": (1.0, 2.0)}, code=code) == code
    assert not capsys.readouterr().err
    assert suite("--fastest", "v2", ms={"v1": (0.5, 4.0), "v2": (1.0, 2.0)}, code=code) == expected
    assert capsys.readouterr().err == "v2 is not the fastest: v1, B 4, S 8 takes 500 us, v2 1 ms\n"


def test_without_the_guard_the_order_does_not_matter(suite):
    assert suite(ms={"v1": (0.5, 4.0), "v2": (1.0, 2.0)}) == 0


@pytest.mark.parametrize("flags", (["--fastest", "v9"], ["--fastest", "v2", "--metrics", "accuracy"]))
def test_a_guard_that_could_not_fail_is_refused(refused, flags):
    assert "needs it among --models, and throughput or memory among --metrics" in refused(SCRIPT, "--device", "cpu", *flags)


def test_the_models_and_the_shape_that_are_measured_and_the_page(suite, monkeypatch, tmp_path):
    monkeypatch.setattr(known_models, "available", lambda options, known: ["v1", "v2-compile"])
    sizes = ("--preset", "medium", "--batch-sizes", "preset", "--seq-lengths", "preset")
    suite("--models", "available", *sizes, ms={"v1": (2.0, 4.0), "v2": (1.0, 2.0)})
    written = read_json(tmp_path / "benchmark_suite/benchmark.json")
    assert written["shapes"] == [[16, 512]] and written["planned"] == ["v1", "v2-compile"]
    page = (tmp_path / "benchmark_suite/benchmark.html").read_text()
    assert "<h1>Benchmark</h1>" in page and "<svg" in page and "(2.00x)" in page
