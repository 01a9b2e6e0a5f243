"""What the flags of an analysis script say reaches the code that does the work."""

import importlib
import sys
from pathlib import Path

from common import cli
from common import device as devices
from common.analysis.comparisons import regression
from common.documents import fusion_report
from common.training import profiler, run

import pytest
import torch


class Reached(Exception):
    """Holds the arguments with which the work would have begun."""


def reach(*arguments: object) -> None:
    raise Reached(*arguments)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """started(script, "module.function", flags): the arguments with which a script calls that function."""

    def start(name: str, called: str, flags: str = "") -> tuple:
        script = importlib.import_module(name)
        module, function = called.split(".")
        monkeypatch.setattr(getattr(script, module), function, reach)
        monkeypatch.setattr(sys, "argv", [name, *flags.split()])
        with pytest.raises(Reached) as reached:
            script.main()
        return reached.value.args

    monkeypatch.chdir(tmp_path)
    return start


def test_the_ablation_study(started):
    called = "fusion_ablation_study", "ablation.measure"
    assert started(*called)[2:] == (False, 5)
    assert started(*called, "--all-combinations --rounds 2")[2:] == (True, 2)


def test_the_regression_test(started):
    flags = "--baseline-results a --current-results b --min-speedup 1.5 --loss-tolerance 0.5"
    assert started("performance_regression_test", "regression.compare", flags) == (Path("a"), Path("b"), 1.5, 0.5)


@pytest.mark.parametrize(("failures", "code"), [([], 0), (["slower"], 1)])
def test_the_regression_test_fails_where_its_verdict_has_failures(monkeypatch, failures, code):
    script = importlib.import_module("performance_regression_test")
    monkeypatch.setattr(script.regression, "compare", lambda *_: regression.Verdict("", failures))
    monkeypatch.setattr(sys, "argv", ["test", "--baseline-results", "a", "--current-results", "b"])
    assert script.main() == code


def test_the_fusion_report(started):
    flags = "--output a.md --baseline b --fused f --ablation x.json --sequence-dirs p q"
    inputs, output = started("generate_fusion_report", "fusion_report.write", flags)
    assert inputs == fusion_report.Inputs(Path("b"), Path("f"), Path("x.json"), [Path("p"), Path("q")])
    assert output == Path("a.md")


def test_the_products(started):
    flags = "--dtype bfloat16 --allow-tf32 --device cpu --batch-sizes 1,2 --sequence-lengths 8"
    try:
        _, batches, lengths, device, precision, tf32 = started("analyze_gemm_operations", "gemms.measure", flags)
        assert (batches, lengths, device.type, precision.name, tf32) == ([1, 2], [8], "cpu", "bf16", True)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        devices.prepare(torch.device("cpu"), 0)
        torch.use_deterministic_algorithms(False)


def test_the_mode_of_torch_compile(monkeypatch):
    version, modes = importlib.import_module("tiny_llama_v2"), []
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: modes.append(mode) or function)
    flags = ["--enable-torch-compile", "--torch-compile-mode", "max-autotune", "--num-layers", "1", "--device", "cpu"]
    version.make_model(cli.parse(run.parser(version).parse_args(flags)))
    assert modes[-1] == "max-autotune"


@pytest.mark.parametrize(
    ("steps", "asked", "active", "slow"), [(20, 3, 3, 4), (20, 1, 1, 2), (20, 5, 5, 6), (6, 3, 2, 3), (2, 3, 1, 2)]
)
def test_the_steps_of_a_profile(tmp_path, steps, asked, active, slow):
    """The last ones, as many as asked for but less than half of the run; the profiler also slows the one before them."""
    flags = ["--num-steps", str(steps), "--profile-steps", str(asked), "--profile-dir", str(tmp_path)]
    watched = profiler.Profiler(cli.parse(cli.parser(None).parse_args(flags)), torch.device("cpu"))
    assert (watched.active, watched.slow_steps(steps)) == (active, slow)
