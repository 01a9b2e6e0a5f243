"""The scaling study: its cells are planned and measured in turn, how a job may end, real jobs on gloo, and the report."""

import json
from pathlib import Path

from common import device as devices
from common.errors import RunError, UsageError
from common.files import read_json, schema_of, write_json
from common.records.study_files import Scaling
from common.studies import known_models, scaling
from tests import records, study_options
from tests.conftest import ROOT
from tests.small_traces import rank_trace

import pytest
import torch

SCRIPT = ROOT / "version4_ultra_fused/scaling_study.py"
KNOWN = known_models.find(ROOT)


def planned(**changes) -> tuple[list[tuple], list[str]]:
    _, cells, left_out = scaling.plan(study_options.scaling(Path("out"), **changes), KNOWN)
    return [(cell["model"], cell["parallel"], cell["processes"], cell["batch_size"]) for cell in cells], left_out


def test_what_cannot_be_measured_is_named():
    found = [("v1", None, 1, 4), ("v1", "ddp", 2, 4), ("v1", "ddp", 4, 4)]
    assert planned(processes=[4, 2], forms=["ddp"]) == (found, [])
    cells, left_out = planned(models=["v4"], processes=[1, 2])
    assert left_out == ["v4, fsdp: v4 does not support it"]
    assert cells == [("v4", None, 1, 4), ("v4", "ddp", 2, 4)]
    assert planned(capture_step=True)[1] == ["v1, fsdp: v1 does not support it"]  # not a captured step


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "select", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert scaling.default_processes(torch.device("cuda")) == scaling.default_processes(torch.device("cpu")) == [1, 2]
    with pytest.raises(UsageError, match="--processes 4: GPUs here: 3"):
        planned(processes=[1, 4])


def test_cells_are_measured_in_turn_and_profiled_once(monkeypatch, tmp_path):
    calls = []

    def answer(cell, model, options, arguments, profiled):
        calls.append((cell["parallel"], cell["processes"], cell["batch_size"], profiled))
        run = {"step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2}, "peak_mib": 5.0, "kind": "process RSS"}
        found = {key: records.record()[key] for key in ("device", "environment")} | {"run": run, "traced": {}}
        return found | {"status": "ok", "reason": None}

    monkeypatch.setattr(scaling, "run_job", answer)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    arguments = study_options.scaling(tmp_path, forms=["ddp"])
    code = scaling.measure(arguments, *scaling.plan(arguments, KNOWN), KNOWN)
    assert code == 0 and calls == [
        (None, 1, 4, False), (None, 1, 4, False), ("ddp", 2, 4, True), ("ddp", 2, 4, False),
    ]  # fmt: skip
    measured = read_json(tmp_path / "scaling.json", schema_of(Scaling))
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2, 2] and measured["variables"]["NCCL_NVLS_ENABLE"] == "0"
    assert measured["status"] == "completed" and scaling.analyze(tmp_path / "scaling.json")


@pytest.mark.parametrize("code, said, status, reason", [
    (1, "step 1\nerror: rank 1: out of memory: lower\nSignal 15", "out of memory", "rank 1: out of memory: lower"),
    (1, "exitcode  : -9 (pid: 7)\nlast", "out of memory", "killed by the system (SIGKILL)"),
    (3, "", "failed", "exit code 3"),
], ids=["memory", "killed", "silent"])  # fmt: skip
def test_the_end_of_a_job_is_a_status(code, said, status, reason):
    found = scaling.ending(code, said)
    assert found["status"] == status and found["reason"].startswith(reason)


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    script = tmp_path / "late.py"
    script.write_text("import time\ntime.sleep(600)")
    assert scaling.torchrun(1, [str(script)], 1, 0.5, tmp_path) == (None, "")


def test_what_the_traces_of_a_job_say(tmp_path):
    for rank in (0, 1):
        name = f"trace_{f'rank{rank}_' if rank else ''}2026.json"
        (tmp_path / name).write_text(json.dumps(rank_trace(rank)))
    assert [rank["waiting_ms"] for rank in scaling.communicated(tmp_path, 2)["ranks"]] == pytest.approx([0.02, 0])
    assert "2 processes of 3 wrote a trace" in scaling.communicated(tmp_path, 3)["trace_problem"]


@pytest.mark.slow
def test_a_real_study_on_two_processes(execute, config, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    execute(
        SCRIPT, "--models", "v1", "--parallel", "ddp", "--processes", "1,2", "--batch-size", "1", "--seq-len", "16",
        "--config", config, "--num-steps", "3", "--repeats", "1", "--device", "cpu",
    )  # fmt: skip
    folder = tmp_path / "scaling_study"
    one, two = read_json(folder / "scaling.json", schema_of(Scaling))["cells"]
    assert one["runs"][0]["step_ms"]["count"] == 3 and two["status"] == "ok" and two["runs"][0]["peak_mib"] > 50
    for rank in two["ranks"]:
        assert rank["communication_ms"] == pytest.approx(rank["overlapped_ms"] + rank["exposed_ms"])
        assert rank["communication_ms"] == pytest.approx(rank["waiting_ms"] + rank["moving_ms"]) and rank["moving_ms"] > 0
    assert {path.suffix for path in folder.iterdir()} == {".csv", ".html", ".json", ".md"}


def test_the_report(tmp_path):
    path = tmp_path / "scaling.json"
    write_json(path, records.scaling())
    text = scaling.analyze(path).markdown()
    for said in ("NCCL_NVLS_ENABLE was 0.", "v1, fsdp, 2 x 4: out of memory: CUDA", "80.0%",
                 "v1, zero1: v1 does not support it"):  # fmt: skip
        assert said in text


def test_efficiency_is_against_one_process():
    """It takes 8 ms."""
    rows = {(row["parallel"], row["processes"]): row for row in scaling.results(records.scaling())}
    ddp = rows["ddp", 2]
    assert (ddp["ms"], ddp["efficiency"], ddp["tokens_per_second"]) == pytest.approx((10, 0.8, 2 * 4 * 128 / 0.010))
    assert (ddp["exposed_ms"], ddp["exposed_waiting_ms"]) == (4, 1.5) and rows[None, 1]["efficiency"] == 1
    assert rows["fsdp", 2]["ms"] is None


def test_a_file_in_which_nothing_was_measured(tmp_path):
    failed = {"status": "failed", "reason": "why", "runs": []}
    write_json(tmp_path / "s.json", records.scaling(cells=[cell | failed for cell in records.scaling()["cells"]]))
    with pytest.raises(RunError, match="nothing was measured; the first: v1, one process, 1 x 4, failed: why"):
        scaling.analyze(tmp_path / "s.json")
