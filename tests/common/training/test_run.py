"""A run of tiny_llama_v1.py as a user meets it: outputs, exit codes, one-line errors,
interruptions.
"""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from common import cli, data
from common.training import ending, flop_counters, run
from tests.conftest import PATHS, ROOT, TINY, V1, run_options, without_gpu
from tracepage.errors import RunError
from tracepage.records import run_record
from tracepage.show import tables
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

SCRIPT = V1 / "tiny_llama_v1.py"
VERSIONS = sorted(ROOT.glob("version*_*/tiny_llama_v*.py"))
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "4")


def losses(path: Path) -> list[float]:
    return json.loads(path.read_text())["loss"]["all"]


def test_a_run_prints_a_summary_and_writes_its_record(run_script, execute, tmp_path):
    done = run_script(
        SCRIPT, *QUICK, "--deterministic", "--time-phases", "--metrics-out", "out/metrics.json"
    )
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    assert record["schema"] == "tiny-llama-run/1" and record["status"] == "completed"
    assert len(record["loss"]["all"]) == len(record["step_ms"]["all"]) == 4
    assert record["step_ms"]["p20"] <= record["step_ms"]["median"] <= record["step_ms"]["p80"]
    assert record["tokens_per_second"] == pytest.approx(2 * 16 / record["step_ms"]["median"] * 1e3)
    assert set(record["phases_ms"]) == {"forward", "backward", "optimizer"}
    assert record["memory"]["peak_mib"] > 0 and record["parameters"] > 0
    assert f"step time    {tables.format_time(record['step_ms']['median'])} (p20 " in done.stdout
    assert "entropy of the source" in done.stdout, (
        "the floor of synthetic data stands beside the loss"
    )
    assert record["deterministic"] is True and ", fp32, deterministic, " in done.stdout
    for seed in (0, 1):
        flags = ("--deterministic", "--seed", seed, "--metrics-out", "again.json")
        execute(SCRIPT, *QUICK, *flags)
        same = losses(tmp_path / "again.json") == record["loss"]["all"]
        assert same == (seed == 0), (
            "the same seed gives the same bits in another process, another seed other losses"
        )


def test_a_run_ends_with_the_loss_on_text_that_training_does_not_see(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = tiny_llama_v1.train(options("--eval-steps", "3"))
    tokens = data.markov(options().model.vocab_size, 0).tokens
    assert result.dataset.tokens.tolist() == tokens[:950_000].tolist()
    unseen = data.Batches(
        data.Dataset("unseen", tokens[950_000:], ""), (2, 16, 3), 0, torch.device("cpu")
    )
    with torch.no_grad():
        expected = sum(result.prepared.model.loss(*unseen[i]).item() for i in range(3)) / 3
    held_out = run_record.read(result.metrics)["held_out"]
    assert held_out["loss"] == pytest.approx(expected, rel=1e-6) and held_out["sequences"] == 6
    assert held_out["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    shown = f"  held out     loss {expected:.3f}, perplexity {math.exp(expected):,.1f} (6 sequences that training does not see)"
    assert shown in capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("no_kernels")
def test_held_out_losses_of_all_versions_and_of_a_resumed_run_agree(execute, tmp_path):
    flags, found = (*QUICK, "--eval-steps", 2, "--metrics-out", "metrics.json"), []
    halves = [("--num-steps", steps, "--checkpoint-dir", "saved", "--resume") for steps in (2, 4)]
    for script, *more in [*((path,) for path in VERSIONS), *((SCRIPT, *half) for half in halves)]:
        execute(script, *flags, *more)
        found.append(run_record.read(tmp_path / "metrics.json")["held_out"]["loss"])
    *versions, half, resumed = found
    assert versions == pytest.approx([versions[0]] * 4, abs=1e-3)
    assert resumed == versions[0] != half


def test_mixed_precision_trains_like_fp32(execute, tmp_path):
    execute(SCRIPT, *QUICK, "--metrics-out", "fp32.json")
    full = losses(tmp_path / "fp32.json")
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        execute(SCRIPT, *QUICK, "--use-amp", "--amp-dtype", dtype, "--metrics-out", "amp.json")
        mixed = json.loads((tmp_path / "amp.json").read_text())
        assert mixed["precision"]["compute"] == short
        assert (
            mixed["loss"]["all"] == pytest.approx(full, abs=0.02) and mixed["loss"]["all"] != full
        )


def options(*flags: str):
    return run_options(tiny_llama_v1, *QUICK, "--device", "cpu", *flags)


@pytest.mark.usefixtures("known_ceilings")
def test_the_result_names_every_file_that_was_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = tiny_llama_v1.train(
        options("--enable-all-profiling", "--validate-setup", "--flops-dir", "there")
    )
    assert result.exit_code == 0 and json.loads(result.metrics.read_text()) == result.record
    assert (
        result.profiles[0].name.startswith("profile_")
        and result.flops[0].name == "flops_profile.json"
    )
    named = {path for path in (*result.profiles, *result.flops, result.metrics) if path.is_file()}
    # TensorBoard's events
    named |= {file for path in result.profiles if path.is_dir() for file in path.iterdir()}
    assert named | {Path("there") / flop_counters.MODEL_PROFILE} >= {
        path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()
    }
    counts = json.loads(result.flops[0].read_text())["counts"]
    assert {row["counter"] for row in counts} >= {
        "formula, causal",
        "formula, full S x S",
        "FlopCounterMode",
    }


def test_a_folder_whose_name_is_not_utf_8_gets_all_but_the_events_of_tensorboard(execute, tmp_path):
    said = execute(SCRIPT, *QUICK, "--device", "cpu", "--profile-dir", "caf\udce9").out
    assert "note: TensorBoard writes into no folder whose name is not UTF-8\n" in said
    assert "  page         caf?/run.html\n" in said and (tmp_path / "caf\udce9/run.html").exists()
    assert len(losses(tmp_path / "metrics_v1.json")) == 4


def test_a_version_that_does_not_train_is_refused(monkeypatch, tmp_path):
    def half_frozen(chosen):
        model = tiny_llama_v1.make_model(chosen)
        model.layers[0].mlp.requires_grad_(False)
        return model

    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RunError,
        match="does not train: 3 of 20 parameters .* layers.0.mlp.gate_proj.weight has no gradient",
    ):
        tiny_llama_v1.train(options(), half_frozen)
    assert not list(tmp_path.iterdir())


BAD_INPUT = {  # what a flag alone may not be: tests/common/test_cli.py
    "--batch-size 0": "--batch-size",
    "--data nowhere.txt": "nowhere.txt",
    "--data file --vocab-size 300": "too few for a sequence length",
    "--save-model file/below": "--save-model",
    "--metrics-out .": "--metrics-out",
    "--capture-step --device cpu": "needs a GPU",
    "--parallel ddp": "--parallel ddp needs torchrun",
    "--resume": "add --checkpoint-dir",
}


@pytest.mark.parametrize("arguments, named", BAD_INPUT.items(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line_and_exit_code_2(refused, tmp_path, arguments, named):
    (tmp_path / "file").write_text("too short")
    assert named in refused(SCRIPT, *arguments.split())
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "pytorch_profiles"}, (
        "nothing is left half-written"
    )


@without_gpu
def test_a_gpu_that_is_not_there_is_one_line(refused):
    assert "PyTorch sees no GPU" in refused(SCRIPT, "--device", "cuda")


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(execute, tmp_path):
    said = execute(SCRIPT, *QUICK, "--num-steps", 20, "--learning-rate", 1e30, check=1).err
    assert "the loss is" in said and "step" in said
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert record["status"].startswith("failed: the loss is") and all(
        math.isfinite(loss) for loss in record["loss"]["all"]
    )


def test_an_error_in_the_middle_keeps_the_steps_before_it(at_step, execute, tmp_path):
    """Out of memory at step 8, when nothing has been printed since step 5."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    at_step(8, fail)
    said = execute(SCRIPT, *QUICK, "--num-steps", 20, "--log-every", 5, check=1).err
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert "lower --batch-size" in said
    assert record["status"].startswith("failed: out of memory")
    assert len(record["loss"]["all"]) == len(record["step_ms"]["all"]) == 7


ERRORS = {
    "bug": (ValueError("a bug\nin detail"), "failed: a bug"),
    "second": (KeyboardInterrupt(), "interrupted"),
}


@pytest.mark.parametrize("error, status", ERRORS.values(), ids=ERRORS.keys())
def test_any_other_error_is_raised_again_after_the_record(
    at_step, monkeypatch, tmp_path, error, status
):
    """A bug keeps its traceback. A second Ctrl-C ends a step that hangs."""

    def fail() -> None:
        raise error

    at_step(3, fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(error)) as raised:
        tiny_llama_v1.train(options())
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert raised.value is error and record["status"] == status and len(record["loss"]["all"]) == 2


def test_a_signal_while_the_record_is_written_waits(monkeypatch, tmp_path):
    real = run.write_measurement

    def write(path, *arguments) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(path, *arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "write_measurement", write)
    with pytest.raises(KeyboardInterrupt), cli.signals_raised():
        tiny_llama_v1.train(options())
    assert len(losses(tmp_path / "metrics_v1.json")) == 4


def test_a_signal_in_the_last_step_leaves_a_complete_run(at_step, monkeypatch, tmp_path):
    at_step(4, lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.chdir(tmp_path)
    result = tiny_llama_v1.train(options())
    assert (result.record["status"], len(result.record["step_ms"]["all"]), result.exit_code) == (
        "completed",
        4,
        0,
    )


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_measured(at_step, execute, tmp_path, kind):
    at_step(2, lambda: os.kill(os.getpid(), kind))
    assert "v1: interrupted, 2 of 4 steps" in execute(SCRIPT, *QUICK, check=128 + kind).out
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert (
        record["status"] == "interrupted"
        and len(record["loss"]["all"]) == len(record["step_ms"]["all"]) == 2
    )


def test_what_fails_after_the_training_loses_no_measurement(monkeypatch, tmp_path, at_step):
    monkeypatch.chdir(tmp_path)
    chosen = options("--save-model", "model", "--time-phases")
    monkeypatch.setattr(
        ending,
        "phase_times",
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")),
    )
    with pytest.raises(RunError, match="out of memory: lower"):
        tiny_llama_v1.train(chosen)
    assert len(losses(tmp_path / "metrics_v1.json")) == 4
    saved = tmp_path / "model/model.safetensors"
    at_step(2, lambda: (saved.unlink(), saved.mkdir()))
    with pytest.raises(RunError, match="cannot write model/model.safetensors"):
        tiny_llama_v1.train(chosen)


def losses_in_a_process(folder: Path, *flags: str) -> list[float]:
    command = [sys.executable, str(SCRIPT), *flags, "--metrics-out", "metrics.json"]
    subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": PATHS}, check=True, timeout=300
    )
    return losses(folder / "metrics.json")


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [(), ("--use-amp",)])
def test_same_bits_on_the_gpu(tmp_path, amp):
    a, b = (
        losses_in_a_process(tmp_path, "--num-steps", "20", "--device", "cuda", *amp)
        for _ in range(2)
    )
    assert a == b and all(math.isfinite(loss) for loss in a)


@pytest.mark.gpu
def test_gpu_and_cpu_train_alike(tmp_path):
    cpu, gpu = (
        losses_in_a_process(tmp_path, *QUICK, "--device", device) for device in ("cpu", "cuda")
    )
    assert gpu == pytest.approx(cpu, abs=1e-4)
    assert json.loads((tmp_path / "metrics.json").read_text())["memory"]["kind"] == "GPU allocator"


def test_times_and_the_line_of_progress_follow_from_the_clock(monkeypatch, capsys, tmp_path):
    class Seconds(run.Clock):
        def mark(self) -> int:
            self.marks.append(float(len(self.marks)))
            return len(self.marks) - 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "Clock", Seconds)
    assert tiny_llama_v1.train(options("--log-every", "1")).record["step_ms"]["all"] == [1000.0] * 4
    assert "1 s a step           32 tokens/s     3 s left\n" in capsys.readouterr().out


def test_lines_come_by_the_clock_fit_80_columns_and_foretell_by_recent_steps(capsys):
    """Steps of 100 ms but for every tenth, of 2 s; a line after each."""
    times = [2000.0 if i % 10 == 9 else 100.0 for i in range(200)]
    clock = SimpleNamespace(milliseconds=lambda start, _: times[start // 2])
    chosen = options("--num-steps", "123456", "--batch-size", "999", "--seq-len", "99")
    loop = run.Loop(chosen, torch.device("cpu"), clock, 0)
    for _ in times:
        loop.keep(torch.tensor(10.75))
        loop.log()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 80 and len(lines) == 200
    left = {line.rpartition("tokens/s")[2].split()[0] for line in lines}
    assert left <= {"205", "206"}, "minutes"
    assert "100 ms a step" in lines[0] and "2 s a step" in lines[9]

    assert not loop.overdue
    loop.last_line -= run.terminal.SECONDS + 1
    assert loop.overdue
    loop.keep(torch.tensor(1.0))
    times.append(1.0)
    loop.log()
    assert not loop.overdue


def test_a_resumed_run_foretells_the_steps_that_it_has_left(capsys):
    clock = SimpleNamespace(milliseconds=lambda *_: 1000.0)
    loop = run.Loop(options("--num-steps", "10"), torch.device("cpu"), clock, steps_before=6)
    loop.keep(torch.tensor(1.0))
    loop.log()
    words = capsys.readouterr().out.split()
    assert words[:2] == ["step", "7/10"] and words[-3:] == ["3", "s", "left"]


def test_a_loss_that_is_no_number_does_not_count_as_the_process_s_own(monkeypatch):
    monkeypatch.setattr(run.ranks, "joined", lambda: True)
    clock = SimpleNamespace(milliseconds=lambda *_: 1000.0)
    loop = run.Loop(options(), torch.device("cpu"), clock, 0)
    for loss in (2.0, 1.0, math.nan):
        loop.keep(torch.tensor(loss))
    with pytest.raises(RunError, match="the loss is nan at step 3"):
        loop.read(alone=True)
    assert loop.losses == [2, 1] and loop.own_losses == 2


def test_the_rate_in_a_line_is_that_of_all_processes(as_rank, capsys):
    """Of four, each with 2 x 16 tokens in a step of a second."""
    as_rank(0, 4)
    clock = SimpleNamespace(milliseconds=lambda *_: 1000.0)
    loop = run.Loop(options(), torch.device("cpu"), clock, 0)
    loop.keep(torch.tensor(1.0))
    loop.log()
    assert " 128 tokens/s " in capsys.readouterr().out


def test_a_line_comes_between_those_of_log_every(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.terminal, "SECONDS", -1.0)
    tiny_llama_v1.train(options("--log-every", "100"))
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "a step" in line]
    assert shown[:4] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_run_begins_with_a_note_where_other_programs_use_the_cores(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.OtherPrograms, "note", lambda _: "others")
    tiny_llama_v1.train(options())
    assert capsys.readouterr().out.startswith("note: others\nstep ")
