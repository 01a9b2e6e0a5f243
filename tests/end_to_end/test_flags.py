"""The flags of a study's or an analysis's script reach the code that does the work."""

import importlib
import sys
from pathlib import Path

import pytest

V1, V2 = "version1_pytorch_baseline", "version2_pytorch_fused"


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
    called = f"{V2}.fusion_ablation_study", "ablation.measure"
    assert started(*called)[2:4] == (False, 5)
    assert started(*called, "--all-combinations --rounds 2")[2:4] == (True, 2)


def test_the_regression_test(started):
    flags = "--baseline-results a --current-results b --min-speedup 1.5 --loss-tolerance 0.5"
    called = f"{V2}.performance_regression_test", "compare.regression"
    assert started(*called, flags) == (Path("a"), Path("b"), 1.5, 0.5)


def test_the_fusion_report(started):
    flags = "--output a.md --baseline b --fused f --ablation x.json --sequence-dirs p q"
    *inputs, output = started(f"{V2}.generate_fusion_report", "compare.fusion_report", flags)
    assert inputs == [[Path("b")], [Path("f")], Path("x.json"), [Path("p"), Path("q")]]
    assert output == Path("a.md")


def test_the_products(started):
    flags = "--dtype bfloat16 --allow-tf32 --device cpu --batch-sizes 1,2 --sequence-lengths 8"
    called = f"{V1}.analyze_gemm_operations", "gemm_operations.measure"
    _, asked, device, _ = started(*called, flags)
    assert (asked.batch_sizes, asked.sequence_lengths, device.type) == ([1, 2], [8], "cpu")
    assert asked.dtype == "bfloat16" and asked.allow_tf32
