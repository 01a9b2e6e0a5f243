"""The ladder of problems on processes: its tables and measure.py; tests/test_exercises.py runs its
own tests.
"""

import re
import runpy

from common.config import resolve
from tests.conftest import ROOT, cells
from tracepage.cost import flops

import pytest

FOLDER = ROOT / "version4_ultra_fused/exercises/distributed"
README = (FOLDER / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## Problem (\d)(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
COLLECTIVES = {"0": 1, "1": 2, "3": 3 * 22 + 2}  # of the preset large by stage


def test_the_answers_of_the_accounting_are_those_of_the_solution():
    formulas = runpy.run_path(str(FOLDER / "solution/problem4_accounting.py"))
    state, sent, seconds, exposed = (
        formulas[name]
        for name in ("state_bytes", "sent_bytes", "communication_seconds", "exposed_seconds")
    )
    config = resolve("large").model
    parameters = flops.parameters(config)["total"]
    assert f"{parameters:,} parameters and {config.num_layers} blocks" in SECTIONS["4"]
    rows = cells(SECTIONS["4"].split("<details>")[1])
    stages, buckets = (
        [row for row in rows if len(row) == 6][1:],
        [row for row in rows if len(row) == 3][1:],
    )
    assert [row[0] for row in stages] == list(COLLECTIVES) and len(buckets) == 4
    for name, *shown in stages:
        stage, collectives = int(name), COLLECTIVES[name]
        moved = sent(parameters, 8, stage)
        assert shown == [
            *(f"{state(parameters, ranks, stage) / 2**30:.2f}" for ranks in (2, 8)),
            f"{moved / 1e9:.2f}",
            str(collectives),
            f"{seconds(moved, collectives, 20e-6, 100e9) * 1e3:.1f}",
        ]
    for name, *shown in buckets:
        count = int(name.split()[0])
        communication = seconds(sent(parameters, 8, 0), count, 20e-6, 100e9)
        assert shown == [
            f"{communication * 1e3:.1f}",
            f"{exposed(communication, 0.1, count) * 1e3:.1f}",
        ]


@pytest.fixture
def measure(run_script):
    """measure(folder): what measure.py in that folder shows, line by line. Two processes."""

    def run(folder):
        sizes = (
            "--num-steps",
            2,
            "--seq-len",
            8,
            "--hidden-dim",
            16,
            "--num-layers",
            1,
            "--device",
            "cpu",
        )
        launch = (
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            2,
            folder / "measure.py",
        )
        return run_script("-m", *launch, *sizes).stdout.splitlines()

    return run


@pytest.mark.slow
def test_measure_shows_every_form_of_a_step(measure, monkeypatch):
    monkeypatch.setenv("KERNEL_EXERCISES", "solution")
    shown = measure(FOLDER)
    rows = [re.split(r"\s{2,}", line.strip())[0] for line in shown]
    assert "2 processes, gloo" in shown[0]
    assert rows[1:] == ["step", "no communication", "flat", "overlap", "zero1"]


@pytest.mark.slow
def test_measure_names_what_is_not_written_and_measures_the_rest(measure, monkeypatch):
    monkeypatch.setenv("KERNEL_EXERCISES", "starter")
    shown = [line.split()[0] for line in measure(FOLDER) if "not written: " in line]
    assert shown == ["flat", "overlap", "zero1"]


def test_measure_needs_torchrun(refused):
    assert "start it with torchrun" in refused(FOLDER / "measure.py")
