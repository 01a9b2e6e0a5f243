"""The ladder of problems on processes: its tables and measure.py; tests/test_exercises.py runs its own tests."""

import os
import re
import runpy
import shutil

from common.analysis.formulas import flops
from common.config import resolve
from tests.conftest import PATHS, ROOT, cells

import pytest

FOLDER = ROOT / "version4_ultra_fused/exercises/distributed"
README = (FOLDER / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## Problem (\d)(.*?)(?=^## )", README, re.MULTILINE | re.DOTALL))
COLLECTIVES = {"0": 1, "1": 2, "3": 3 * 22 + 2}  # of the preset large by stage


def test_the_answers_of_the_accounting_are_those_of_the_solution():
    formulas = runpy.run_path(str(FOLDER / "solution/problem7_accounting.py"))
    state, sent, seconds, exposed = (
        formulas[name] for name in ("state_bytes", "sent_bytes", "communication_seconds", "exposed_seconds")
    )
    config = resolve("large").model
    parameters = flops.parameters(config)["total"]
    assert f"{parameters:,} parameters and {config.num_layers} blocks" in SECTIONS["7"]
    rows = cells(SECTIONS["7"].split("<details>")[1])
    stages, buckets = [row for row in rows if len(row) == 6][1:], [row for row in rows if len(row) == 3][1:]
    assert [row[0] for row in stages] == list(COLLECTIVES) and len(buckets) == 4
    for name, *shown in stages:
        stage, collectives = int(name), COLLECTIVES[name]
        moved = sent(parameters, 8, stage)
        assert shown == [
            *(f"{state(parameters, ranks, stage) / 2**30:.2f}" for ranks in (2, 8)), f"{moved / 1e9:.2f}", str(collectives),
            f"{seconds(moved, collectives, 20e-6, 100e9) * 1e3:.1f}",
        ]  # fmt: skip
    for name, *shown in buckets:
        count = int(name.split()[0])
        communication = seconds(sent(parameters, 8, 0), count, 20e-6, 100e9)
        assert shown == [f"{communication * 1e3:.1f}", f"{exposed(communication, 0.1, count) * 1e3:.1f}"]


ONE_FAILS = """
from datetime import timedelta

import adapter
import torch.distributed as dist

adapter.LIMIT = timedelta(hours=1)  # in all processes, which import this file: longer than the test waits

def fail(rank):
    if dist.get_rank() == rank:
        raise NotImplementedError(f"on rank {rank}")
    dist.barrier()

if __name__ == "__main__":
    processes = adapter.Processes()
    for rank in (0, 1):
        try:
            processes.run(fail, rank)
        except NotImplementedError as error:
            print(error)
    print(processes.run(dist.get_rank))
    processes.close()
"""


@pytest.mark.slow
def test_the_error_of_the_process_that_failed_is_shown_and_the_next_job_runs(run_script, tmp_path):
    """And not that of the process which then loses its connection."""
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    paths = os.pathsep.join((PATHS, str(FOLDER)))
    shown = run_script("one_fails.py", PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1").stdout
    assert shown == "on rank 0\non rank 1\n[0, 1]\n"


@pytest.fixture
def measure(run_script):
    """measure(folder, *measurements): what measure.py in that folder shows, and the first cell of each line. Two processes."""

    def run(folder, *measurements):
        sizes = ("--num-steps", 2, "--max-mib", 1, "--seq-len", 8, "--hidden-dim", 16, "--num-layers", 1, "--device", "cpu")
        launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, folder / "measure.py")
        shown = run_script("-m", *launch, *measurements, *sizes).stdout
        return shown, [re.split(r"\s{2,}", line.strip())[0] for line in shown.splitlines()]

    return run


@pytest.mark.slow
def test_measure_shows_every_form_of_a_step_the_fitted_line_and_the_split_layer(measure, monkeypatch):
    monkeypatch.setenv("KERNEL_EXERCISES", "solution")
    shown, rows = measure(FOLDER, "bandwidth", "steps", "layer")
    assert "2 processes, gloo" in shown and "fit: latency" in shown and "not written" not in shown
    assert [str(4**i) for i in range(1, 11)] == [row.replace(",", "") for row in rows if row.replace(",", "").isdigit()]
    assert rows[-9:-4] == ["no communication", "flat", "overlap", "zero1", "fully_shard"]
    assert "each of the two all-reduces: 4,096 bytes" in shown  # 8 sequences of 8 tokens, D 16, float32
    assert rows[-2:] == ["whole", "split"]


@pytest.mark.slow
def test_measure_names_what_is_not_written_and_measures_the_rest(measure, tmp_path, monkeypatch):
    """Only problem 2 is solved."""
    monkeypatch.setenv("KERNEL_EXERCISES", "starter")
    mine = tmp_path / "mine"
    shutil.copytree(FOLDER, mine, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(mine / "solution/problem2_flat.py", mine / "starter")
    _, rows = measure(mine, "bandwidth", "steps", "layer")
    left = "not written yet, so not measured: "
    assert [row for row in rows[1:] if row not in ("step", "layer")] == [
        f"{left}bandwidth (problem1_bandwidth.py)",
        f"{left}overlap (problem3_overlap.py), zero1 (problem4_zero1.py), fully_shard (problem5_fully_shard.py)",
        "no communication", "flat",
        f"{left}split (problem6_tensor_parallel.py)", "each of the two all-reduces: 4,096 bytes", "whole",
    ]  # fmt: skip


def test_measure_needs_torchrun(refused):
    assert "start it with torchrun" in refused(FOLDER / "measure.py", "steps")
