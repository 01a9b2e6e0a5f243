"""The ablation: a measured study holds every combination, torch.compile may be missing, and a
signal ends it.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from common import device as devices
from studies import ablation
from tests import study_options
from tests.conftest import ROOT
from tracepage.files import read_json, schema_of
from tracepage.readers.source import make_source
from tracepage.records.study_files import Ablation
from tracepage.views import fusion_ablation
from version2_pytorch_fused import tiny_llama_v2

import pytest

SCRIPT = ROOT / "version2_pytorch_fused/fusion_ablation_study.py"


def test_all_combinations_are_16_of_the_model_and_2_of_the_optimizer():
    every = ablation.combinations(True, True)
    assert len(every) == len(set(every)) == 18
    assert every[0] == (False,) * 5 and every[-1] == (True,) * 5
    assert [sum(fusions) for fusions in every if fusions[ablation.ADAMW]] == [1, 5]
    without = ablation.combinations(True, False)
    assert len(without) == 10 and not any(fusions[-1] for fusions in without)


def test_the_short_list_is_none_each_alone_all_but_each_and_all():
    short = ablation.combinations(False, True)
    assert list(map(sum, short)) == [0, *5 * [1], *5 * [4], 5]
    assert list(map(sum, ablation.combinations(False, False))) == [0, *4 * [1], *4 * [3], 4]


@pytest.fixture
def study(config, tmp_path, monkeypatch) -> Callable[..., tuple[dict, str]]:
    """study(*flags, rounds=1, code=0): what is measured without torch.compile, and its report;
    `code` is the exit code.

    To compile its eight models would take minutes.
    """

    def run(*flags: str, rounds: int = 1, code: int = 0) -> tuple[dict, str]:
        monkeypatch.setattr(
            devices,
            "compile_problem",
            lambda device: "torch.compile does not work here: no compiler",
        )
        monkeypatch.delenv("PYTORCH_FALLBACK_ATTENTION", raising=False)
        path = tmp_path / "fusion_ablation.json"
        assert (
            ablation.measure(
                tiny_llama_v2, study_options.resolved(config, *flags), True, rounds, path
            )
            == code
        )
        return read_json(path, schema_of(Ablation)), fusion_ablation.render_ablation(
            path
        ).terminal()

    return run


@pytest.fixture
def few_combinations(monkeypatch) -> None:
    few = [(False,) * 5, (True, *4 * [False]), (*4 * [True], False)]
    monkeypatch.setattr(ablation, "combinations", lambda *_: few)


def test_a_study_of_version_2(study, capsys):
    measured, text = study(rounds=2)
    printed = capsys.readouterr().out
    assert (
        printed.startswith("left out: torch.compile does not work here: no compiler\n")
        and "round 2 of 2: 10 comb" in printed
    )
    found = measured["combinations"]
    assert len(found) == 10 and measured["counted"] == "operators"
    losses = [c["loss"] for c in found]
    assert max(losses) - min(losses) < 1e-5 and {c["steps"] for c in found} == {
        3 + 2 * (1 + measured["steps_per_round"]) + 1
    }
    assert all(
        len(c["round_ms"]) == 2 and c["step_ms"]["count"] == 2 * measured["steps_per_round"]
        for c in found
    )
    assert all(c["peak_mib"] is None for c in found)  # on a CPU
    launches = {fusion_ablation.label(c): c["launches_per_step"] for c in found}
    assert (
        min(launches, key=launches.get) == "QKV + flash + SwiGLU + AdamW"
        and max(launches, key=launches.get) == "none"
    )
    # Forward 2 products and backward 4 less in each of two layers, and the sums of input gradients
    # that they need.
    assert launches["QKV"] < launches["none"] - 10
    assert launches["AdamW"] < launches["none"] - 100
    assert (
        "Left out: torch.compile" in text
        and "operator calls/step" in text
        and "operator calls that do work" in text
    )


@pytest.mark.usefixtures("few_combinations")
def test_a_signal_ends_the_study_in_half_precision_after_the_round(study, monkeypatch):
    def interrupted(function, device, warmup, iterations):
        function()
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return [1.0] * iterations

    sent = []
    monkeypatch.setattr(ablation, "benchmark", interrupted)
    measured, _ = study("--use-amp", rounds=3, code=128 + signal.SIGTERM)
    plain, _, fused = (c["loss"] for c in measured["combinations"])
    assert measured["precision"] == {"compute": "bf16"} and 1e-5 < abs(plain - fused) < 0.02
    assert measured["rounds"] == 1 and all(c["round_ms"] == [1.0] for c in measured["combinations"])


@pytest.mark.usefixtures("few_combinations")
def test_the_order_of_the_combinations_turns_from_round_to_round(study, monkeypatch):
    """What the machine does over a round must not fall on the same combinations each time."""
    measured = []

    def benchmark(function, device, warmup, iterations):
        measured.append(function)
        return [1.0] * iterations

    monkeypatch.setattr(ablation, "benchmark", benchmark)
    counted = make_source("profile", Path(), {"name": ["gemm"], "duration_ns": [9.0]}, steps=2)
    monkeypatch.setattr(ablation, "count", lambda train: counted)
    study(rounds=3)
    first, second, third = (measured[number : number + 3] for number in (0, 3, 6))
    assert len(set(first)) == 3 and second == first[::-1] and third == first


def test_launches_are_kernels_of_a_step_without_copies_and_fills(tmp_path):
    names = ["gemm", "softmax", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]
    columns = {"name": names, "calls": [6, 4, 2, 8], "duration_ns": [9.0] * 4}
    source = make_source("profile", tmp_path, columns, steps=2)
    assert ablation.launches_per_step(source) == 5


def test_an_environment_that_overrides_a_fusion_is_refused(refused, monkeypatch):
    monkeypatch.setenv("PYTORCH_FALLBACK_ATTENTION", "1")
    assert "PYTORCH_FALLBACK_ATTENTION=1" in refused(SCRIPT)


@pytest.mark.slow
def test_with_torch_compile(run_script, config, tmp_path):
    run_script(SCRIPT, "--config", config, "--rounds", "1", "--all-combinations")
    measured = read_json(tmp_path / "fusion_ablation" / "fusion_ablation.json", schema_of(Ablation))
    assert len(measured["combinations"]) == (10 if measured["left_out"] else 18)
