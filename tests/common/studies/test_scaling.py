"""The scaling study: its cells, what a job's end means, efficiencies, the model beside them, and real jobs on gloo."""

import json
import os
import signal
import sys
import threading
from argparse import Namespace
from pathlib import Path

from common import files, ranks
from common.analysis.profiles import communication
from common.config import ModelConfig
from common.errors import RunError, UsageError
from common.files import read_json, write_json
from common.studies import benchmark, scaling
from tests.conftest import ROOT
from tests.records import profile, record
from tests.records import scaling as made_up
from tests.small_traces import rank_trace

import pytest
import torch

SCRIPT = ROOT / "version4_ultra_fused/scaling_study.py"
KNOWN = benchmark.known_models(ROOT)
SMALL = """
model: {hidden_size: 32, num_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48, vocab_size: 50}
"""


def options(**changes) -> Namespace:
    chosen = dict(
        models=["v1"], forms=["ddp", "fsdp"], processes=[1, 2], batch_size=4, global_batch_size=4, seq_len=8, num_steps=2,
        profile_steps=2, repeats=2, timeout=100, preset="tiny", config=None, seed=0, device="cpu", use_amp=False, amp_dtype=None,
        capture_step=None, link_gbs=1.0, link_us=1.0, keep_traces=False, fill_gpus=False, model=ModelConfig(),
        output_dir=Path("out"),
    )  # fmt: skip
    return Namespace(**chosen | changes)


def places(cells: list[dict]) -> list[tuple]:
    return [(cell["model"], cell["parallel"], cell["processes"], cell["batch_size"]) for cell in cells]


# ---------------------------------------------------------------------------------------------------------------- plan


def test_one_process_is_measured_without_a_form_and_a_cell_of_both_scalings_once():
    cells, left_out = scaling.plan(options(processes=[4, 2], global_batch_size=8, forms=["ddp"]), KNOWN)
    assert places(cells) == [
        ("v1", None, 1, 4), ("v1", None, 1, 8), ("v1", "ddp", 2, 4), ("v1", "ddp", 4, 4), ("v1", "ddp", 4, 2)
    ]  # fmt: skip
    assert left_out == []


def test_what_cannot_be_measured_is_left_out_with_a_line():
    cells, left_out = scaling.plan(options(models=["v4"], processes=[1, 2, 3]), KNOWN)
    assert left_out == [
        "strong scaling on 3: 3 does not divide --global-batch-size 4", "v4, fsdp: v4 does not support it"
    ]  # fmt: skip
    assert places(cells) == [("v4", None, 1, 4), ("v4", "ddp", 2, 4), ("v4", "ddp", 2, 2), ("v4", "ddp", 3, 4)]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--models", "v9"], "--models: there is no 'v9'; there are v1, "),
        (["--models", "hf"], "--models: there is no 'hf'"),
        (["--parallel", "zero3"], "--parallel: there is no 'zero3'; there are ddp, zero1, fsdp"),
        (["--processes", "2,2"], "--processes: 2 is given twice"),
        (["--processes", "0"], "'0' is not a positive whole number"),
        (["--link-gbs", "0"], "--link-gbs: 0 GB/s"),
        (["--link-us", "-1"], "'-1' is not a number from 0 on"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_nothing_is_written(refused, flags, message, tmp_path):
    assert message in refused(SCRIPT, "--device", "cpu", *flags)
    assert not list(tmp_path.iterdir())


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(scaling.devices, "select", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert scaling.default_processes(torch.device("cuda")) == [1, 2]
    assert scaling.default_processes(torch.device("cpu")) == [1, 2]
    with pytest.raises(UsageError, match="--processes 4: there are 3 GPUs"):
        scaling.plan(options(processes=[1, 4]), KNOWN)


# ----------------------------------------------------------------------------------------------------------- measuring


def measured_with(monkeypatch, path: Path, outcome=lambda cell: {}, **changes) -> tuple[int, list, dict]:
    """What `measure` makes of jobs that answer outcome(cell), by default "ok" and what was measured."""
    calls = []

    def answer(cell, model, chosen, profiled, gpus=None):
        calls.append((*places([cell])[0][1:], profiled))
        run = {"step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2}, "peak_mib": 5.0, "kind": "process RSS"}
        found = {key: record()[key] for key in ("device", "environment")} | {"run": run, "parameters": 9}
        return found | {"status": "ok", "reason": None} | outcome(cell)

    monkeypatch.setattr(scaling, "run_job", answer)
    chosen = options(**changes)
    cells, left_out = scaling.plan(chosen, KNOWN)
    return scaling.measure(cells, left_out, chosen, KNOWN, path), calls, read_json(path, scaling.SCHEMA)


def test_cells_are_measured_in_turn_and_profiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    code, calls, measured = measured_with(monkeypatch, tmp_path / "scaling.json", forms=["ddp"])
    assert code == 0 and calls == [
        (None, 1, 4, True), (None, 1, 4, False),
        ("ddp", 2, 4, True), ("ddp", 2, 2, True), ("ddp", 2, 4, False), ("ddp", 2, 2, False),
    ]  # fmt: skip
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2, 2, 2] and measured["variables"]["NCCL_NVLS_ENABLE"] == "0"
    assert measured["link"] == {"gb_per_second": 1.0, "microseconds": 1.0, "source": "given", "messages": []}
    assert measured["status"] == "completed" and scaling.analyze(tmp_path / "scaling.json")


def test_jobs_fill_the_gpus_and_each_has_its_own(monkeypatch, tmp_path):
    busy, most, seen, lock, together = set(), [], [], threading.Lock(), threading.Barrier(2, timeout=60)

    def answer(cell, model, chosen, profiled, gpus=None):
        own = set((gpus or "0,1,2,3").split(","))
        with lock:
            assert not own & busy and (gpus is None or len(own) == cell["processes"])
            busy.update(own)
            most.append(len(busy))
        if cell["processes"] == 2:
            together.wait()  # for the other job of two processes, which so must run at the same time
        with lock:
            busy.difference_update(own)
            seen.append((*places([cell])[0][1:], profiled))
        return {"status": "failed", "reason": "made up"}

    monkeypatch.setattr(scaling, "run_job", answer)
    monkeypatch.setattr(scaling.devices, "select", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    chosen = options(processes=[1, 2, 4], fill_gpus=True, repeats=1)
    assert [len(scaling.gpu_sets(n, chosen)) for n in (1, 2, 4)] == [4, 2, 1]
    cells, _ = scaling.plan(chosen, KNOWN)
    assert scaling.measure(cells, [], chosen, KNOWN, tmp_path / "s.json") == 1
    assert max(most) == 4 and sorted(map(str, seen)) == sorted(map(str, ((*place[1:], True) for place in places(cells))))


@pytest.mark.parametrize("status, code", [("out of memory", 0), ("timed out", 1), ("failed", 1)])
def test_a_failed_cell_is_a_result_and_not_repeated(monkeypatch, tmp_path, status, code):
    def outcome(cell):
        return {"status": status, "reason": "why"} if (cell["parallel"], cell["batch_size"]) == ("fsdp", 4) else {}

    got, calls, measured = measured_with(monkeypatch, tmp_path / "s.json", outcome)
    assert got == code and calls.count(("fsdp", 2, 4, True)) == 1 and ("fsdp", 2, 4, False) not in calls
    assert f"- v1, fsdp, 2 x 4: {status}: why" in scaling.analyze(tmp_path / "s.json").markdown()


def test_a_signal_keeps_what_was_measured(monkeypatch, tmp_path):
    def outcome(cell):
        if cell["parallel"] == "ddp":
            os.kill(os.getpid(), signal.SIGTERM)
            return {"status": "failed", "reason": "stopped"}
        return {}

    code, _, measured = measured_with(monkeypatch, tmp_path / "scaling.json", outcome)
    assert code == 128 + signal.SIGTERM and measured["status"] == "interrupted"
    assert [cell["status"] for cell in measured["cells"]][:2] == ["ok", "not run"]
    assert "The run was interrupted" in scaling.analyze(tmp_path / "scaling.json").markdown()


def test_a_link_that_cannot_be_measured_leaves_the_model_out(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "torchrun", lambda *_: (1, "error: no route"))
    code, _, measured = measured_with(monkeypatch, tmp_path / "scaling.json", link_us=None)
    assert code == 0 and measured["link"] is None
    assert "the model on paper: the link was not measured: no route" in measured["left_out"]
    assert "- the model on paper: the link was not measured" in scaling.analyze(tmp_path / "scaling.json").markdown()


@pytest.mark.parametrize(
    "code, said, status, reason",
    [
        (None, "", "timed out", "not done after 100 s"),
        (
            1,
            "step 1\nerror: rank 1: out of memory: lower --batch-size\nSignal 15",
            "out of memory",
            "rank 1: out of memory: lower",
        ),
        (1, "error: this run needs at least 9 GiB of memory, and A GPU has 1", "out of memory", "this run needs"),
        (1, "exitcode  : -9 (pid: 7)\nlast", "out of memory", "killed by the system (SIGKILL)"),
        (1, "error: no such thing\nTraceback\nexitcode : 1", "failed", "no such thing"),
        (3, "", "failed", "exit code 3"),
    ],
    ids=["time", "memory", "refused", "killed", "error", "silent"],
)
def test_the_end_of_a_job_is_a_status(code, said, status, reason):
    found = scaling.ending(code, said, options())
    assert found["status"] == status and found["reason"].startswith(reason)


def test_a_job_that_takes_too_long_is_ended(tmp_path):
    script = tmp_path / "late.py"
    script.write_text("import time\ntime.sleep(600)")
    assert scaling.torchrun(1, [str(script)], options(timeout=0.5), tmp_path) == (None, "")


def test_what_the_traces_of_a_job_say(tmp_path):
    """The sizes of a captured step's collectives stand in the trace of the eager step."""
    for rank in (0, 1):
        name = f"trace_{f'rank{rank}_' if rank else ''}2026.json"
        (tmp_path / name).write_text(json.dumps(rank_trace(rank, sizes=False)))
    cell, v1, v4 = {"processes": 2, "parallel": "zero1"}, KNOWN["v1"], KNOWN["v4"]
    found = scaling.traced(tmp_path, cell, v1)
    assert [each["bytes"] for each in found["collectives"]] == [None, None]
    (tmp_path / "eager_trace_2026.json").write_text(json.dumps(rank_trace(0)))
    found = scaling.traced(tmp_path, cell, v1)
    assert [rank["waiting_ms"] for rank in found["ranks"]] == pytest.approx([0.02, 0])
    assert found["collectives"] == [
        {"kind": "all_reduce", "count": 2, "bytes": 8000, "beside": "backward"},
        {"kind": "all_gather", "count": 1, "bytes": 4000, "beside": "nothing"},
    ]
    assert scaling.traced(tmp_path, cell, v4)["collectives"][1]["beside"] == "backward"  # its optimizer communicates
    both = scaling.traced(tmp_path, cell | {"parallel": "fsdp"}, v1)["collectives"]
    assert [(each["bytes"], each["beside"]) for each in both[1:]] == [(2000, "forward"), (2000, "backward")]
    (tmp_path / "trace_rank1_2026.json").unlink()
    assert "1 processes of 2 wrote a trace" in scaling.traced(tmp_path, cell, v1)["trace_problem"]


def test_the_shares_of_the_step_on_one_process(tmp_path):
    rows = [{"name": "a", "phase": phase, "self_device_us": us} for phase, us in
            (("forward", 10.0), ("backward", 20.0), ("optimizer", 10.0), ("other", 99.0))]  # fmt: skip
    write_json(tmp_path / "profile_2026.json", profile(record(), rows, [{"name": "k"}]))
    found = scaling.traced(tmp_path, {"processes": 1, "parallel": None}, KNOWN["v1"])
    assert found == {"shares": {"forward": 0.25, "backward": 0.5, "optimizer": 0.25}}


# ------------------------------------------------------------------------------------------------------------ analysis


def rows_of(measured: dict) -> dict[tuple, dict]:
    return {(row["scaling"], row["parallel"], row["processes"]): row for row in scaling.results(measured)}


def test_efficiency_and_the_model_beside_it():
    """One process takes 8 ms. The model: 4 kB over 1 GB/s take 0.004 ms, all exposed, which is all that comes to 8 ms (weak)."""
    rows = rows_of(made_up())
    weak, strong = rows["weak", "ddp", 2], rows["strong", "ddp", 2]
    assert (weak["ms"], weak["efficiency"], weak["tokens_per_second"]) == pytest.approx((10, 0.8, 2 * 4 * 128 / 0.010))
    assert strong["efficiency"] == pytest.approx(8 / (2 * 5)) and rows["weak", None, 1]["efficiency"] == 1
    assert (weak["model_ms"], weak["model_error"]) == pytest.approx((8.004, -0.1996))
    assert strong["model_ms"] == pytest.approx(3 + 2 + 0.004)  # the update does not shrink with the batch
    assert (weak["exposed_ms"], weak["exposed_waiting_ms"]) == (4, 1.5) and strong["exposed_ms"] is None
    assert rows["weak", "fsdp", 2]["ms"] is None and rows["weak", "fsdp", 2]["model_ms"] > 0  # predicted, not measured


def test_the_model_needs_the_step_on_one_process_and_a_link():
    without = made_up()
    without["cells"] = without["cells"][1:]
    for measured in (made_up(link=None), without):
        assert scaling.predicted(measured, "weak", "v1", "ddp", 2) is None
        assert scaling.model_table(measured, "weak")[1] == []
    assert rows_of(without)["weak", "ddp", 2]["efficiency"] is None


def test_the_model_goes_on_to_thousands_of_gpus():
    header, body = scaling.model_table(made_up(), "weak")
    assert header == ["GPUs", "v1, ddp: model", "v1, fsdp: model"] and [row[0] for row in body][-1] == 4096
    assert body[0][1:] == ["100.0%", "100.0%"]
    assert [row[0] for row in scaling.model_table(made_up(), "strong")[1]] == [1, 2, 4]


def test_the_report(tmp_path):
    path = tmp_path / "scaling.json"
    write_json(path, made_up())
    report = scaling.analyze(path)
    kinds = ("csv", "html", "json", "md", "png")
    assert sorted(file.suffix[1:] for file in report.write(tmp_path / "out", "scaling", kinds)) == sorted(kinds)
    text = report.markdown()
    for said in (
        "NVLink multicast was off (NCCL_NVLS_ENABLE=0).", "A model, not a measurement. Link: 1 GB/s",
        "is off by 10.0% at the median and by 20.0% at most (weak, v1, ddp, 2 x 4)", "v1, fsdp, 2 x 4: out of memory: CUDA",
        "v1, zero1: v1 does not support it",
    ):  # fmt: skip
        assert said in text
    assert len(scaling.step_table(scaling.results(made_up()))[1]) == 4
    assert "was not set: NCCL decides" in scaling.multicast(made_up(variables={}))
    assert "left to NCCL (NCCL_NVLS_ENABLE=1)" in scaling.multicast(made_up(variables={"NCCL_NVLS_ENABLE": "1"}))


def test_a_file_in_which_nothing_was_measured(tmp_path):
    failed = {"status": "failed", "reason": "why", "runs": []}
    write_json(tmp_path / "s.json", made_up(cells=[cell | failed for cell in made_up()["cells"]]))
    with pytest.raises(RunError, match="nothing was measured; the first: v1, one process, 1 x 4, failed: why"):
        scaling.analyze(tmp_path / "s.json")
    write_json(tmp_path / "s.json", made_up(cells=[cell | {"runs": []} for cell in made_up()["cells"]]))
    with pytest.raises(UsageError, match="nothing was measured, but the status is ok"):
        scaling.analyze(tmp_path / "s.json")


# ----------------------------------------------------------------------------------------------------------- real jobs


def test_a_link_is_measured_by_all_reduces(tmp_path, monkeypatch):
    """One process does what two do; the job is made up, but for its command."""
    for name, value in zip(ranks.VARIABLES, (0, 0, 1, "localhost", 0), strict=True):
        monkeypatch.setenv(name, str(value))

    def torchrun(processes, command, chosen, folder, gpus=None):
        assert (processes, command[:2]) == (2, ["-m", "common.studies.scaling"])
        monkeypatch.setattr(sys, "argv", command[1:])
        scaling.main()
        return 0, ""

    monkeypatch.setattr(scaling, "torchrun", torchrun)
    found, problem = scaling.link(options(link_us=None, link_gbs=None), needed=True)
    assert problem is None and found["gb_per_second"] > 0 and found["source"] == "all-reduces between 2 processes"
    assert [message["bytes"] for message in found["messages"]] == list(scaling.LINK_BYTES["cpu"])
    found, _ = scaling.link(options(link_us=7.0, link_gbs=None), needed=True)
    assert found["microseconds"] == 7 and found["source"].endswith("; microseconds given")
    assert scaling.link(options(link_us=None), needed=False) == (None, None)


@pytest.mark.slow
def test_a_real_study_on_two_processes(execute, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "small.yaml").write_text(SMALL)
    printed = execute(
        SCRIPT, "--models", "v1", "--parallel", "ddp", "--processes", "1,2", "--batch-size", "1", "--seq-len", "16",
        "--config", "small.yaml", "--num-steps", "3", "--profile-steps", "2", "--repeats", "1", "--device", "cpu",
        "--link-gbs", "1", "--link-us", "100", "--keep-traces",
    )  # fmt: skip
    assert "leaves out strong scaling on 2: 2 does not divide --global-batch-size 1" in printed.out
    folder = tmp_path / "scaling_study"
    measured = files.read(folder / "scaling.json", scaling.Scaling)
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


def test_a_job_that_fails(tmp_path):
    script = tmp_path / "tiny_llama_broken.py"
    script.write_text("import sys\nprint('error: out of memory: lower --batch-size', file=sys.stderr)\nsys.exit(1)")
    cell = {"model": "broken", "parallel": None, "processes": 1, "batch_size": 1}
    found = scaling.run_job(cell, benchmark.Model("broken", script), options(), profiled=False)
    assert found == {"status": "out of memory", "reason": "out of memory: lower --batch-size"}
