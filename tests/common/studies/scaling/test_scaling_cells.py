"""The scaling study's cells: they are planned, measured in turn or side by side, and real jobs on gloo."""

import threading
from pathlib import Path

from common import device as devices
from common import files
from common.analysis.profiles import communication
from common.errors import UsageError
from common.files import read_json
from common.records.study_files import Scaling
from common.studies import known_models
from common.studies.scaling import scaling_cells, scaling_job, scaling_report, torchrun
from tests import study_options
from tests.conftest import ROOT
from tests.records import record

import pytest
import torch

SCRIPT = ROOT / "version4_ultra_fused/scaling_study.py"
KNOWN = known_models.find(ROOT)


def places(cells: list[dict]) -> list[tuple]:
    return [(cell["model"], cell["parallel"], cell["processes"], cell["batch_size"]) for cell in cells]


def test_a_cell_of_both_scalings_is_measured_once_and_what_cannot_be_measured_is_named():
    cells, left_out = scaling_cells.plan(study_options.scaling(processes=[4, 2], global_batch_size=8, forms=["ddp"]), KNOWN)
    assert places(cells) == [
        ("v1", None, 1, 4), ("v1", None, 1, 8), ("v1", "ddp", 2, 4), ("v1", "ddp", 4, 4), ("v1", "ddp", 4, 2)
    ]  # fmt: skip
    assert left_out == []

    cells, left_out = scaling_cells.plan(study_options.scaling(models=["v4"], processes=[1, 2, 3]), KNOWN)
    assert left_out == [
        "strong scaling on 3: 3 does not divide --global-batch-size 4", "v4, fsdp: v4 does not support it"
    ]  # fmt: skip
    assert places(cells) == [("v4", None, 1, 4), ("v4", "ddp", 2, 4), ("v4", "ddp", 2, 2), ("v4", "ddp", 3, 4)]

    _, left_out = scaling_cells.plan(study_options.scaling(capture_step=True), KNOWN)
    assert left_out == ["v1, fsdp: v1 does not support it"]  # not a captured step


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "select", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert scaling_cells.default_processes(torch.device("cuda")) == [1, 2]
    assert scaling_cells.default_processes(torch.device("cpu")) == [1, 2]
    with pytest.raises(UsageError, match="--processes 4: GPUs here: 3"):
        scaling_cells.plan(study_options.scaling(processes=[1, 4]), KNOWN)


def measured_with(monkeypatch, path: Path, outcome=lambda cell: {}, **changes) -> tuple[int, list, dict]:
    """What `measure` makes of jobs that answer outcome(cell), by default "ok" and what was measured."""
    calls = []

    def answer(cell, model, chosen, profiled, gpus=None):
        calls.append((*places([cell])[0][1:], profiled))
        run = {"step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2}, "peak_mib": 5.0, "kind": "process RSS"}
        found = {key: record()[key] for key in ("device", "environment")} | {"run": run, "parameters": 9}
        return found | {"status": "ok", "reason": None} | outcome(cell)

    monkeypatch.setattr(scaling_job, "run", answer)
    chosen = study_options.scaling(**changes)
    cells, left_out = scaling_cells.plan(chosen, KNOWN)
    return scaling_cells.measure(cells, left_out, chosen, KNOWN, path), calls, read_json(path, files.schema_of(Scaling))


def test_cells_are_measured_in_turn_and_profiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    code, calls, measured = measured_with(monkeypatch, tmp_path / "scaling.json", forms=["ddp"])
    assert code == 0 and calls == [
        (None, 1, 4, True), (None, 1, 4, False),
        ("ddp", 2, 4, True), ("ddp", 2, 2, True), ("ddp", 2, 4, False), ("ddp", 2, 2, False),
    ]  # fmt: skip
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2, 2, 2] and measured["variables"]["NCCL_NVLS_ENABLE"] == "0"
    assert measured["link"] == {"gb_per_second": 1.0, "microseconds": 1.0, "source": "given", "messages": []}
    assert measured["status"] == "completed" and scaling_report.analyze(tmp_path / "scaling.json")


def test_jobs_fill_the_gpus_and_each_has_its_own(monkeypatch, tmp_path):
    seen, together = [], threading.Barrier(2, timeout=300)

    def answer(cell, model, chosen, profiled, gpus=None):
        if cell["processes"] == 2:
            together.wait()  # for the other job of two processes, which so must run at the same time
            seen.append(gpus)
        return {"status": "failed", "reason": "made up"}

    monkeypatch.setattr(scaling_job, "run", answer)
    monkeypatch.setattr(devices, "select", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    chosen = study_options.scaling(processes=[1, 2, 4], fill_gpus=True, repeats=1)
    assert [scaling_cells.gpu_sets(n, chosen) for n in (1, 2, 4)] == [["0", "1", "2", "3"], ["0,1", "2,3"], [None]]
    cells, _ = scaling_cells.plan(chosen, KNOWN)
    assert scaling_cells.measure(cells, [], chosen, KNOWN, tmp_path / "s.json") == 1
    assert {*seen} == {"0,1", "2,3"} and {cell["status"] for cell in cells} == {"failed"}


def test_a_link_that_cannot_be_measured_leaves_the_model_out(monkeypatch, tmp_path):
    monkeypatch.setattr(torchrun, "run", lambda *_: (1, "error: no route"))
    code, _, measured = measured_with(monkeypatch, tmp_path / "scaling.json", link_us=None)
    assert code == 0 and measured["link"] is None
    assert "the model on paper: the link was not measured: no route" in measured["left_out"]
    assert "- the model on paper: the link was not measured" in scaling_report.analyze(tmp_path / "scaling.json").markdown()


@pytest.mark.slow
def test_a_real_study_on_two_processes(execute, config, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    printed = execute(
        SCRIPT, "--models", "v1", "--parallel", "ddp", "--processes", "1,2", "--batch-size", "1", "--seq-len", "16",
        "--config", config, "--num-steps", "3", "--profile-steps", "2", "--repeats", "1", "--device", "cpu",
        "--link-gbs", "1", "--link-us", "100", "--keep-traces",
    )  # fmt: skip
    assert "leaves out strong scaling on 2: 2 does not divide --global-batch-size 1" in printed.out
    folder = tmp_path / "scaling_study"
    measured = files.read(folder / "scaling.json", Scaling)
    one, two = measured["cells"]
    assert sum(one["shares"].values()) == pytest.approx(1) and one["runs"][0]["step_ms"]["count"] == 3
    assert two["status"] == "ok" and two["runs"][0]["peak_mib"] > 50
    (reduced,) = (each for each in two["collectives"] if each["kind"] == "all_reduce")
    assert reduced["bytes"] >= 4 * two["parameters"]
    for rank in two["ranks"]:
        assert rank["communication_ms"] == pytest.approx(rank["overlapped_ms"] + rank["exposed_ms"])
        assert rank["communication_ms"] == pytest.approx(rank["waiting_ms"] + rank["moving_ms"]) and rank["moving_ms"] > 0
    (traces,) = (path for path in (folder / "traces").iterdir() if "ddp" in path.name)
    assert len(communication.find(traces)) == 2
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".csv", ".html", ".json", ".md", ".png"}
