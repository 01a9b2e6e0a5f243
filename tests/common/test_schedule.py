"""The learning rate of each step: its formula, runs that follow it, and what is refused."""

import json
from types import SimpleNamespace

from common import schedule
from studies import version_files
from tests.conftest import ROOT, TINY, run_options
from version4_ultra_fused import tiny_llama_v4

import pytest
import torch

V1, V4 = (
    ROOT / version
    for version in (
        "version1_pytorch_baseline/tiny_llama_v1.py",
        "version4_ultra_fused/tiny_llama_v4.py",
    )
)
QUICK = (*TINY, "--data", "synthetic", "--device", "cpu")
COSINE = ("--lr-schedule", "cosine", "--lr-warmup-steps", 2, "--lr-decay-steps", 8)


@pytest.mark.parametrize(
    "kind, warm_up, decay, expected",
    [
        ("constant", 0, None, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("constant", 4, None, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ("cosine", 2, None, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),  # (1 + cos(pi / 4)) / 2
        ("cosine", 0, 2, [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_the_rate_of_each_step(kind, warm_up, decay, expected):
    options = SimpleNamespace(
        learning_rate=1.0,
        lr_schedule=kind,
        lr_warmup_steps=warm_up,
        lr_decay_steps=decay,
        num_steps=6,
    )
    assert [schedule.learning_rate(options, step) for step in range(6)] == pytest.approx(
        expected, abs=1e-6
    )


def test_a_rate_on_the_device_trains_as_a_number_does(no_kernels, tmp_path):
    losses = []
    for moved in (False, True):
        options = run_options(
            tiny_llama_v4, *QUICK, "--num-steps", 8, "--metrics-out", tmp_path / "run.json", *COSINE
        )

        def make_step(model, optimizer, precision, moved=moved):
            if moved:
                schedule.move_rate(optimizer, torch.device("cpu"))
            return tiny_llama_v4.make_step(model, optimizer, precision)

        losses.append(tiny_llama_v4.train(options, make_step=make_step).record["loss"]["all"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("script", [V1, V4], ids=["v1", "v4"])
def test_a_run_that_goes_on_follows_its_schedule(execute, refused, no_kernels, tmp_path, script):
    def losses(steps: int, *flags: object) -> list[float]:
        execute(script, *QUICK, *COSINE, "--num-steps", steps, "--metrics-out", "run.json", *flags)
        return json.loads((tmp_path / "run.json").read_text())["loss"]["all"]

    saved = ("--checkpoint-dir", "saved")
    assert losses(4, *saved) + losses(7, *saved, "--resume") == losses(7)
    said = refused(
        script, *QUICK, *COSINE, "--num-steps", 9, *saved, "--resume", "--lr-decay-steps", 9
    )
    assert (
        "another learning rate schedule (cosine to step 8 after 2 steps, now cosine to step 9 after 2 steps)"
        in said
    )


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_captured_step_follows_the_schedule(tmp_path, number):
    version = version_files.load(next(ROOT.glob(f"version{number}_*/tiny_llama_v{number}.py")))

    def losses(*flags: object) -> list[float]:
        rest = (
            *TINY,
            "--data",
            "synthetic",
            "--num-steps",
            12,
            "--metrics-out",
            tmp_path / "run.json",
        )
        return version.train(run_options(version, *rest, *flags)).record["loss"]["all"]

    eager = losses("--no-capture-step", *COSINE)
    assert losses("--capture-step", *COSINE) == pytest.approx(eager, abs=2e-3)
    assert losses("--capture-step")[-1] != pytest.approx(eager[-1], abs=2e-3)
