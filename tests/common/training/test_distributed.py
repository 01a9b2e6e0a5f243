"""Training in several processes: torchrun starts two, on gloo, as a user would."""

import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import cli, ranks
from common.training import distributed
from tests.conftest import PATHS, ROOT, TINY, V1, altered_version, finished, run_options
from tracepage.errors import RunError, UsageError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (
    *TINY,
    "--data",
    "synthetic",
    "--num-steps",
    "12",
    "--device",
    "cpu",
    "--metrics-out",
    "metrics.json",
)
CPU = torch.device("cpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def torchrun(run_script) -> Callable[..., subprocess.CompletedProcess]:
    """torchrun(script, *arguments, check=0, **variables): two processes, started as run_script
    starts one.
    """
    return functools.partial(run_script, *TORCHRUN)


@pytest.fixture
def two_nodes(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """two_nodes(script, *arguments): slurm/train.sbatch runs it in one process on each of two
    nodes, both of which are this machine.
    """

    def submit(*arguments: object) -> subprocess.CompletedProcess:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        nodes = 'shift; SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; code=$?; wait; exit $code'
        for name, text in (("srun", nodes), ("scontrol", "echo 127.0.0.1")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        path = os.pathsep.join(
            (str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"])
        )
        variables = {"PATH": path, "PORT": port, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
        job = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
        command = ["bash", ROOT / "slurm/train.sbatch", *arguments]
        return finished(command, tmp_path, os.environ | variables | job | {"SLURM_JOB_ID": "7"})

    return submit


def record(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


# ------------------------------------------------------------------------------------------------------ what is computed


def test_two_processes_compute_what_one_does_with_all_sequences(two_nodes, tmp_path):
    """Gradients, losses and the number of collectives, in each form; with a head that is tied, and
    one that is not. The processes meet as on a cluster.
    """
    done = two_nodes("-m", "tests.parallel_job", tmp_path / "result.json")
    assert "deprecated" not in done.stderr  # of collectives: PyTorch 2.13 has renamed two
    first, second = json.loads((tmp_path / "result.json").read_text())
    for case in first:
        tolerance = 1e-2 if "moments" in case else 2e-3 if "float16" in case else 1e-5
        for found in (first[case], second[case]):
            assert found["gradient_error"] < tolerance and found["loss_error"] < tolerance, case
        assert (
            sorted({*first[case]["compared"], *second[case]["compared"]})
            == first[case]["parameters"]
        )
    # Version 4 cuts tensors, and gathers them
    shared_out = [case for case in first if "zero1" in case and "v4" not in case]
    assert shared_out and all(
        not set(first[case]["compared"]) & set(second[case]["compared"]) for case in shared_out
    )
    assert first["untied ddp"]["fell_by"] > 0.05 and len(first["untied ddp"]["parameters"]) == 21

    layers, buckets = 2, 1  # of at most 25 MiB
    expected = {
        "ddp": {"allreduce": buckets},
        # one a process, of the weights that it has updated
        "zero1": {"allreduce": buckets, "broadcast": 2},
        "fsdp": {"allgather_base": 1 + 2 * layers, "reduce_scatter_base": 1 + layers},
    }  # a block is gathered for each pass; embedding, norms and head stay
    times = 2 * layers + 1  # Version 4: once a sublayer, and once for the embedding and the norms
    expected |= {
        "v4 ddp": {"allreduce": times},
        "v4 zero1": {"reduce_scatter_base": times, "allgather_base": times},
    }
    expected["v4-bf16-moments ddp"] = expected["v4 ddp"]
    expected["v4-bf16-moments zero1"] = expected["v4 zero1"]
    # Shares of a buffer round as the whole buffer does.
    together, shared = (first[f"v4-bf16-moments {form}"] for form in ("ddp", "zero1"))
    assert together["loss_error"] == shared["loss_error"] > 0
    for case, found in first.items():
        assert found["collectives"] == expected.get(case, expected[case.split()[1]]), case


@pytest.mark.slow
def test_the_first_process_alone_writes(torchrun, execute, tmp_path):
    """The losses are those of one process with both batches."""
    flags = [
        "--parallel",
        "zero1",
        "--enable-pytorch-profiler",
        "--save-model",
        "model",
        "--time-phases",
        "--log-every",
        4,
    ]
    flags += ["--eval-steps", 2]
    done = torchrun(SCRIPT, *QUICK, *flags, "--enable-deepspeed-flops")
    assert "zero1 on 2 processes (gloo): batch 2 x 2 = 4 sequences a step" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == [
        "4/12",
        "8/12",
        "12/12",
    ]
    assert done.stdout.count("completed, 12 of 12 steps") == 1

    measured = record(tmp_path)
    assert (measured["training"]["world_size"], measured["training"]["parallel"]) == (2, "zero1")
    assert measured["tokens_per_second"] == pytest.approx(
        2 * 2 * 16 / measured["step_ms"]["median"] * 1e3
    )
    assert len(measured["ranks"]["peak_mib"]) == 2
    traces = sorted(
        path.name.split("_2")[0] for path in (tmp_path / "pytorch_profiles").glob("trace_*.json")
    )
    assert (
        traces == ["trace", "trace_rank1"]
        and len(list((tmp_path / "pytorch_profiles").glob("profile_*.json"))) == 1
    )
    shapes = {
        name: weight.shape
        for name, weight in load_file(tmp_path / "model/model.safetensors").items()
    }
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (32, 64), "gathered from all processes"

    execute(SCRIPT, *QUICK, "--batch-size", 4, "--eval-steps", 2, "--metrics-out", "alone.json")
    alone = json.loads((tmp_path / "alone.json").read_text())
    assert measured["loss"]["all"] == pytest.approx(alone["loss"]["all"], abs=1e-5)
    assert measured["held_out"] == pytest.approx(alone["held_out"], rel=1e-5)


def doing(folder: Path, what: str) -> Path:
    """A version whose second process does something in training step 5; the warm-up has three."""
    number = 5 + run_options(tiny_llama_v1).warmup_steps
    script = altered_version(folder, "second_in_step_five()")
    script.write_text(f"""{script.read_text()}

calls = []


def second_in_step_five():
    calls.append(None)
    if os.environ.get("RANK") == "1" and len(calls) == {number}:
        {what}


if __name__ == "__main__":
    import sys, time

    from common import cli
    from tests.conftest import run_options

    options = run_options(tiny_llama_v1, *sys.argv[1:])
    cli.command(lambda: tiny_llama_v1.train(options, make_model, make_step).exit_code)
""")
    return script


DEATHS = {
    "killed": ("os.kill(os.getpid(), 9)", []),
    "out of memory": ("raise torch.OutOfMemoryError('out of memory')", []),
    # torchrun gives it 30 s to end by itself
    "silent": ("time.sleep(600)", ["--distributed-timeout", "20"]),
}


@pytest.mark.parametrize(
    "death", ["killed", *(pytest.param(name, marks=pytest.mark.slow) for name in list(DEATHS)[1:])]
)
def test_a_process_that_dies_ends_the_job_and_the_record_is_kept(torchrun, tmp_path, death):
    what, flags = DEATHS[death]
    said = torchrun(doing(tmp_path, what), *QUICK, *flags, check=1).stderr
    if death == "silent":  # otherwise torchrun may stop the first process before it has said so
        assert (
            "error: rank 0: another process has ended, or has not answered within --distributed-timeout"
            in said
        )
    assert ("error: rank 1: out of memory" in said) == (death == "out of memory")
    measured = record(tmp_path)
    assert measured["status"].startswith("failed: another process has ended")
    assert (
        len(measured["loss"]["all"])
        == measured["loss"]["own"]
        == len(measured["step_ms"]["all"])
        == 4
    )


def test_a_signal_while_a_process_waits_for_another_writes_the_record(tmp_path):
    """The second process holds step 5, so the first waits in C++, where no handler of a signal
    runs.
    """
    script = doing(tmp_path, "open('held', 'w').close(); time.sleep(600)")
    environment = os.environ | {
        "PYTHONPATH": PATHS,
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
    }
    job = subprocess.Popen(
        [sys.executable, *TORCHRUN, script, *QUICK],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(tmp_path / "held")
        assert not (tmp_path / "metrics.json").exists()
        job.send_signal(signal.SIGTERM)
        wait_for(tmp_path / "metrics.json")
        measured = record(tmp_path)
    finally:
        job.send_signal(signal.SIGTERM)  # a second one ends the sleep
        job.wait(timeout=120)
    assert measured["status"] == "failed: another process, or the device, no longer answers"
    assert (
        len(measured["loss"]["all"])
        == measured["loss"]["own"]
        == len(measured["step_ms"]["all"])
        == 4
    )


def wait_for(path: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} is not there"
        time.sleep(0.1)


@pytest.mark.parametrize("captured", [True, False])
def test_a_captured_step_that_hangs_ends_its_process(as_rank, monkeypatch, capsys, captured):
    """A thread notices that no meeting has been held. PyTorch itself ends an eager step."""
    done, ended = [], threading.Event()
    as_rank(0)
    monkeypatch.setattr(distributed, "PERIOD", 0.01)
    monkeypatch.setattr(distributed.os, "_exit", lambda code: (done.append(code), ended.set()))
    meetings = distributed.Meetings(CPU)
    with meetings.watched(lambda: done.append("kept"), 0.05, captured):
        ended.wait(300 if captured else 0.3)
    assert done[:2] == ["kept", 1] * captured
    assert (
        "error: rank 0: no answer from another process for 0.05 s" in capsys.readouterr().err
    ) == captured


@pytest.mark.parametrize(
    "form", ["fsdp", *(pytest.param(form, marks=pytest.mark.slow) for form in ("zero1", "ddp"))]
)
def test_a_signal_to_one_ends_all_and_another_number_of_processes_goes_on(
    torchrun, execute, tmp_path, form
):
    """One process trains four steps, two some more until one gets SIGTERM, and one the rest; one
    alone trains them all.
    """
    script, losses = doing(tmp_path, "os.kill(os.getpid(), 15)"), []
    saved = ("--checkpoint-dir", "saved", "--resume")
    execute(script, *QUICK, "--batch-size", 4, "--num-steps", 4, *saved)
    losses += record(tmp_path)["loss"]["all"]

    done = torchrun(script, *QUICK, "--num-steps", 100000, *saved, "--parallel", form, check=1)
    assert f"exitcode  : {128 + signal.SIGTERM}" in done.stderr and "error: " not in done.stderr
    stopped = record(tmp_path)
    assert stopped["status"] == "interrupted" and 5 <= len(stopped["loss"]["all"]) < 100000
    losses += stopped["loss"]["all"]

    steps = len(losses) + 3
    execute(script, *QUICK, "--batch-size", 4, "--num-steps", steps, *saved)
    losses += record(tmp_path)["loss"]["all"]
    execute(SCRIPT, *QUICK, "--batch-size", 4, "--num-steps", steps)
    assert (
        losses == pytest.approx(record(tmp_path)["loss"]["all"], abs=1e-5) and len(losses) == steps
    )


def test_moments_that_version_4_shares_out_are_whole_in_a_checkpoint(
    torchrun, execute, no_kernels, tmp_path
):
    """Two processes train four steps under zero1, then two, and one the rest; one alone trains them
    all.
    """
    script = ROOT / "version4_ultra_fused/tiny_llama_v4.py"
    torchrun(script, *QUICK, "--num-steps", 4, "--parallel", "zero1", "--checkpoint-dir", "saved")
    losses = record(tmp_path)["loss"]["all"]
    torchrun(
        script,
        *QUICK,
        "--num-steps",
        6,
        "--parallel",
        "zero1",
        "--checkpoint-dir",
        "saved",
        "--resume",
    )
    losses += record(tmp_path)["loss"]["all"]
    execute(
        script, *QUICK, "--batch-size", 4, "--num-steps", 8, "--checkpoint-dir", "saved", "--resume"
    )
    losses += record(tmp_path)["loss"]["all"]
    torchrun(script, *QUICK, "--num-steps", 6, "--parallel", "zero1")
    assert losses[:6] == record(tmp_path)["loss"]["all"], (
        "the same number of processes: the same bits"
    )
    execute(script, *QUICK, "--batch-size", 4, "--num-steps", 8)
    assert losses == pytest.approx(record(tmp_path)["loss"]["all"], abs=1e-5) and len(losses) == 8


OTHER = """
import os, pathlib, runpy, sys, time, torch

waits, init = pathlib.Path("waits"), torch.distributed.init_process_group
torch.distributed.init_process_group = lambda *given, **named: (waits.touch(), init(*given, **named))
if os.environ["RANK"] == "1":
    sys.argv += sys.argv[1].split()
    while not waits.exists():
        time.sleep(0.01)
del sys.argv[1]
runpy.run_path({!r}, run_name="__main__")
"""


def test_a_process_with_a_wrong_flag_or_other_data_ends_the_others_at_once(torchrun, tmp_path):
    """Where its flag is wrong, the first one waits for it in C++."""
    (tmp_path / "script.py").write_text(OTHER.format(str(SCRIPT)))
    said = torchrun("script.py", "--bogus", *QUICK, check=1).stderr
    assert (
        said.count("error: rank 1: unrecognized arguments: --bogus") == 1
        and "Signal 15 (SIGTERM) received" in said
    )
    said = torchrun("script.py", "--seed 7", *QUICK, check=1).stderr
    assert (
        said.count("error: --data is another text for another process, --seed (7 for rank 1") == 1
        and not (tmp_path / "metrics.json").exists()
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--learning-rate", "0.5"], "--learning-rate (0.5 for rank 1, 0.0015 for rank 0): give"),
        (["--num-layers", "3"], "--num-layers (3 for rank 1, 2 for rank 0): give"),
        (["--use-amp"], "--use-amp (True for rank 1, False for rank 0): give"),
        (["--eval-steps", "1"], "--eval-steps (1 for rank 1, 0 for rank 0): give"),
        (["--save-model", "m"], "--save-model (a path for rank 1, None for rank 0): give"),
        (["--metrics-out", "of_this_node.json"], None),
    ],
)
def test_processes_with_other_options_are_refused_with_their_names(monkeypatch, flags, message):
    theirs = [("sha", distributed._options_by_flag(run_options(tiny_llama_v1, *QUICK, *flags)))]
    monkeypatch.setattr(ranks, "gathered", lambda ours: [ours, *theirs])
    options = run_options(tiny_llama_v1, *QUICK)
    if not message:
        distributed.check_alike(options, "sha")
        return
    with pytest.raises(UsageError) as refusal:
        distributed.check_alike(options, "sha")
    assert str(refusal.value).startswith(message) and refusal.value.shared
    with pytest.raises(UsageError, match="--data is another text for another process, --"):
        distributed.check_alike(options, "another sha")


# --------------------------------------------------------------------------------------------------------- the environment


def test_a_lone_process_is_in_no_group_and_others_take_the_first_form(as_rank):
    options = run_options(tiny_llama_v1, *QUICK)
    assert distributed.form(options) is None and not ranks.joined() and ranks.gathered(3) == [3]
    as_rank(1)
    assert (distributed.form(options), distributed.form(options, ("zero1",))) == ("ddp", "zero1")


@pytest.mark.parametrize(
    "flags, forms, message",
    [
        (
            ["--enable-deepspeed-flops"],
            ranks.FORMS,
            "--parallel fsdp gathers weights in each step: leave --enable-torch-compile",
        ),
        ([], ("ddp", "zero1"), "this script takes --parallel ddp or zero1"),
    ],
)
def test_what_cannot_run_in_parallel_is_refused(as_rank, flags, forms, message):
    as_rank(0)
    with pytest.raises(ValueError, match=message):
        distributed.form(run_options(tiny_llama_v1, *QUICK, "--parallel", "fsdp", *flags), forms)


@pytest.mark.parametrize(
    "rank, shared, said",
    [(0, True, "error: lost\n"), (1, True, ""), (1, False, "error: rank 1: lost\n")],
)
def test_an_error_that_all_have_is_shown_once_and_any_other_with_its_rank(
    as_rank, monkeypatch, capsys, rank, shared, said
):
    def fail():
        raise RunError("lost", shared)

    monkeypatch.setattr(cli, "GRACE", 0)
    as_rank(rank)
    with pytest.raises(SystemExit) as ended:
        cli.command(fail)
    assert (ended.value.code, capsys.readouterr().err) == (1, said)


def test_a_process_that_torchrun_ends_meanwhile_keeps_its_exit_code(as_rank, monkeypatch, capsys):
    def fail() -> None:
        raise UsageError("--learning-rate", shared=True)

    def stop(_) -> None:
        raise cli.Stopped(signal.SIGTERM)

    monkeypatch.setattr(cli.time, "sleep", stop)
    as_rank(1)
    with pytest.raises(SystemExit) as ended:
        cli.command(fail)
    assert (ended.value.code, capsys.readouterr().err) == (2, "")


# -------------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", ranks.FORMS)
def test_a_captured_step_trains_as_an_eager_one_on_two_gpus(torchrun, tmp_path, form):
    losses = []
    for capture in ("--capture-step", "--no-capture-step"):
        flags = [
            *TINY,
            "--data",
            "synthetic",
            "--num-steps",
            "20",
            "--parallel",
            form,
            "--metrics-out",
            "metrics.json",
            capture,
        ]
        torchrun(SCRIPT, *flags, NCCL_NVLS_ENABLE="0")
        losses.append(record(tmp_path)["loss"]["all"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and all(map(math.isfinite, losses[0]))
