"""Training in several processes: torchrun starts two, on gloo, as a user would."""

import functools
import json
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from common import cli, progress, ranks
from common.errors import RunError
from common.precision import Precision
from common.training import distributed
from common.training import record as run_records
from common.training.run import Run
from tests.conftest import ROOT, TINY, V1, altered_version, run_options
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "12", "--device", "cpu")
CPU = torch.device("cpu")


@pytest.fixture
def torchrun(run_script) -> Callable[..., subprocess.CompletedProcess]:
    """torchrun(script, *arguments, check=0, **variables): two processes, started as run_script starts one."""
    return functools.partial(run_script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


@pytest.fixture
def as_rank(monkeypatch) -> Callable[..., None]:
    """as_rank(rank, world_size): this process becomes one of a job, as far as its environment tells."""

    def become(rank: int, world_size: int = 2) -> None:
        for name, value in zip(ranks.VARIABLES, (rank, rank, world_size, "localhost", 29500), strict=True):
            monkeypatch.setenv(name, str(value))

    return become


def record(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "metrics_v1.json").read_text())


# ------------------------------------------------------------------------------------------------------ what is computed


def test_two_processes_compute_what_one_does_with_all_sequences(torchrun, tmp_path):
    """Gradients, losses and the number of collectives, in each form; with a head that is tied, and one that is not."""
    done = torchrun("-m", "tests.parallel_job", tmp_path / "result.json")
    assert "deprecated" not in done.stderr  # of collectives: PyTorch 2.13 has renamed two
    first, second = json.loads((tmp_path / "result.json").read_text())
    for case in first:
        tolerance = 2e-3 if "float16" in case else 1e-5
        for found in (first[case], second[case]):
            assert found["gradient_error"] < tolerance and found["loss_error"] < tolerance, case
        assert sorted({*first[case]["compared"], *second[case]["compared"]}) == first[case]["parameters"]
    shared_out = [case for case in first if "zero1" in case and "v4" not in case]  # Version 4 cuts tensors, and gathers them
    assert shared_out and all(not set(first[case]["compared"]) & set(second[case]["compared"]) for case in shared_out)
    assert first["untied ddp"]["fell_by"] > 0.05 and len(first["untied ddp"]["parameters"]) == 21

    layers, buckets = 2, 1  # of at most 25 MiB
    expected = {
        "ddp": {"allreduce": buckets},
        "zero1": {"allreduce": buckets, "broadcast": 2},  # one a process, of the weights that it has updated
        "fsdp": {"allgather_base": 1 + 2 * layers, "reduce_scatter_base": 1 + layers},
    }  # a block's weights are gathered for each pass; embedding, last norm and head stay
    expected |= {  # Version 4 communicates once a block, and once for the embedding and the norms
        "v4 ddp": {"allreduce": layers + 1},
        "v4 zero1": {"reduce_scatter_base": layers + 1, "allgather_base": layers + 1},
    }
    for case, found in first.items():
        assert found["collectives"] == expected.get(case, expected[case.split()[1]]), case


SLEEPING = """

def make_model(options):
    model = tiny_llama_v1.make_model(options)
    if os.environ["RANK"] == "1":
        model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: time.sleep(0.1))
    return model
"""
MAIN = """

if __name__ == "__main__":
    import time

    from common import cli

    options = cli.parse(cli.parser(None).parse_args())
    cli.command(lambda: tiny_llama_v1.train(options, make_model, make_step).exit_code)
"""


@pytest.mark.slow
def test_the_first_process_alone_writes_and_a_slow_one_is_named(torchrun, execute, tmp_path):
    """The second sleeps in each forward pass of a block. The losses are those of one process with both batches."""
    script = altered_version(tmp_path, "pass")
    script.write_text(script.read_text() + SLEEPING + MAIN)
    flags = ["--parallel", "zero1", "--enable-pytorch-profiler", "--save-model", "model", "--time-phases", "--log-every", 4]
    done = torchrun(script, *QUICK, *flags, "--enable-deepspeed-flops", "--metrics-out", "metrics_v1.json")
    assert "zero1 on 2 processes (gloo): batch 2 x 2 = 4 sequences a step" in done.stdout
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert {"4/12", "8/12", "12/12"} <= {*lines} and len(lines) == len({*lines}), "each line once"
    assert done.stdout.count("completed, 12 of 12 steps") == 1
    assert "rank 1 took " in done.stdout and "rank 0 took " not in done.stdout

    measured = record(tmp_path)
    assert (measured["training"]["world_size"], measured["training"]["parallel"]) == (2, "zero1")
    assert measured["tokens_per_second"] == pytest.approx(2 * 2 * 16 / measured["step_ms"]["median"] * 1e3)
    assert {name: len(values) for name, values in measured["ranks"].items()} == dict.fromkeys(
        ("forward_ms", "step_ms", "peak_mib"), 2
    )
    assert measured["ranks"]["forward_ms"][1] > max(100, measured["ranks"]["forward_ms"][0])
    traces = sorted(path.name.split("_2")[0] for path in (tmp_path / "pytorch_profiles").glob("trace_*.json"))
    assert traces == ["trace", "trace_rank1"] and len(list((tmp_path / "pytorch_profiles").glob("profile_*.json"))) == 1
    assert done.stdout.count("trace_rank1_") == 1 and (tmp_path / "model/model.safetensors").exists()

    execute(SCRIPT, *QUICK, "--batch-size", 4, "--metrics-out", "alone.json")
    alone = json.loads((tmp_path / "alone.json").read_text())
    assert measured["loss"]["all"] == pytest.approx(alone["loss"]["all"], abs=1e-5)


def doing(folder: Path, what: str) -> Path:
    """A version whose second process does something in training step 5; the warm-up has three."""
    number = 5 + cli.parser(None).get_default("warmup_steps")
    script = altered_version(folder, "second_in_step_five()")
    script.write_text(f"""{script.read_text()}

calls = []


def second_in_step_five():
    calls.append(None)
    if os.environ.get("RANK") == "1" and len(calls) == {number}:
        {what}
{MAIN}""")
    return script


DEATHS = {
    "killed": ("os.kill(os.getpid(), 9)", []),
    "out of memory": ("raise torch.OutOfMemoryError('out of memory')", []),
    "silent": ("time.sleep(600)", ["--distributed-timeout", "20"]),  # torchrun gives it 30 s to end by itself
}


@pytest.mark.parametrize("death", ["killed", *(pytest.param(name, marks=pytest.mark.slow) for name in list(DEATHS)[1:])])
def test_a_process_that_dies_ends_the_job_and_the_record_is_kept(torchrun, tmp_path, death):
    what, flags = DEATHS[death]
    done = torchrun(doing(tmp_path, what), *QUICK, *flags, "--metrics-out", "metrics_v1.json", check=1)
    said = done.stderr
    if death == "silent":  # otherwise torchrun may stop the first process before it has said so
        assert "error: rank 0: another process has ended, or has not answered for 20 s" in said
    assert ("error: rank 1: out of memory" in said) == (death == "out of memory")
    assert "Traceback" not in said.split("torch/distributed/run.py")[0].replace("Traceback (most recent call last):\n", "", 1)
    measured = record(tmp_path)
    assert measured["status"].startswith("failed: another process has ended")
    assert len(measured["loss"]["all"]) == measured["loss"]["own"] == len(measured["step_ms"]["all"]) == 4
    # torchrun's signal may come before the first process shows this, as soon as the record is written
    assert "(mean of the last 4, 4 of them rank 0's own; " in run_records.summary(measured)


@pytest.mark.parametrize("form", ["fsdp", *(pytest.param(form, marks=pytest.mark.slow) for form in ("zero1", "ddp"))])
def test_a_signal_to_one_process_ends_all_and_another_number_of_processes_goes_on(torchrun, execute, tmp_path, form):
    """One process trains four steps, two some more until one gets SIGTERM, and one the rest; one alone trains them all."""
    script, losses = doing(tmp_path, "os.kill(os.getpid(), 15)"), []
    saved = ("--checkpoint-dir", "saved", "--resume", "--metrics-out", "metrics_v1.json")
    execute(script, *QUICK, "--batch-size", 4, "--num-steps", 4, *saved)
    losses += record(tmp_path)["loss"]["all"]

    done = torchrun(script, *QUICK, "--num-steps", 100000, *saved, "--parallel", form, "--save-model", "model", check=1)
    assert f"exitcode  : {128 + signal.SIGTERM}" in done.stderr and "error: " not in done.stderr
    stopped = record(tmp_path)
    assert stopped["status"] == "interrupted" and 5 <= len(stopped["loss"]["all"]) < 100000
    losses += stopped["loss"]["all"]
    shapes = {name: weight.shape for name, weight in load_file(tmp_path / "model/model.safetensors").items()}
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (32, 64), "gathered from all processes"

    steps = len(losses) + 3
    execute(script, *QUICK, "--batch-size", 4, "--num-steps", steps, *saved)
    losses += record(tmp_path)["loss"]["all"]
    execute(SCRIPT, *QUICK, "--batch-size", 4, "--num-steps", steps)
    assert losses == pytest.approx(record(tmp_path)["loss"]["all"], abs=1e-5) and len(losses) == steps


def test_moments_that_version_4_shares_out_are_whole_in_a_checkpoint(torchrun, execute, no_kernels, tmp_path):
    """Two processes train four steps under zero1, and one the rest; one alone trains them all."""
    script = ROOT / "version4_ultra_fused/tiny_llama_v4.py"
    flags = (*QUICK, "--metrics-out", "metrics_v1.json")
    torchrun(script, *flags, "--num-steps", 4, "--parallel", "zero1", "--checkpoint-dir", "saved")
    losses = record(tmp_path)["loss"]["all"]
    execute(script, *flags, "--batch-size", 4, "--num-steps", 8, "--checkpoint-dir", "saved", "--resume")
    losses += record(tmp_path)["loss"]["all"]
    execute(script, *flags, "--batch-size", 4, "--num-steps", 8)
    assert losses == pytest.approx(record(tmp_path)["loss"]["all"], abs=1e-5) and len(losses) == 8


ELSEWHERE = """
import os

if os.environ["RANK"] == "1":
    os.mkdir(f"other{os.getpid()}")
    os.chdir(f"other{os.getpid()}")

from common import cli
from version1_pytorch_baseline import tiny_llama_v1

cli.command(tiny_llama_v1.main)  # as every script ends
"""


@pytest.mark.slow
def test_processes_with_different_working_folders_write_and_check_one_checkpoint(torchrun, tmp_path):
    (script := tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    flags = (*QUICK, "--metrics-out", "metrics_v1.json", "--checkpoint-dir", "saved")
    torchrun(script, *flags, "--num-steps", 4, "--checkpoint-every", 2)
    losses = record(tmp_path)["loss"]["all"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [".lock", "step-00000002", "step-00000004"]
    assert not [*tmp_path.glob("other*/*")]
    newest = tmp_path / "saved/step-00000004"
    written = [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "position.json"]
    assert sorted(path.name for path in newest.iterdir()) == written
    os.truncate(newest / "__1_0.distcp", 100)
    said = torchrun(script, *flags, "--num-steps", 4, "--resume").stdout
    reason = "__1_0.distcp is not as SHA256SUMS has it"
    assert f"going on from saved/step-00000002, as step-00000004 is damaged ({reason})\n" in said
    assert record(tmp_path)["loss"]["all"] == losses[2:] and not [*tmp_path.glob("other*/*")]


DIFFERENT = {  # flags of rank 1 alone, and what is said
    "--learning-rate 0.1": "--learning-rate is 0.1 on rank 1, and 0.0015 on rank 0: give all processes the same",
    "--seed 1": "--seed is 1 on rank 1, and 0 on rank 0",
    "--batch-size 3": "--batch-size is 3 on rank 1, and 2 on rank 0",
    "--seq-len 8": "--seq-len is 8 on rank 1, and 16 on rank 0",
    "--use-amp": "--use-amp is True on rank 1, and False on rank 0",
    "--num-heads 2": "--num-heads is 2 on rank 1, and 4 on rank 0",
    "--log-every 3": "--log-every is 3 on rank 1, and 20 on rank 0",
    "--data other.txt": "sha256 of --data's tokens is ",
    "": "the shape of layers.0.mlp.gate_proj.weight is (3, 32) on rank 1, and (64, 32) on rank 0",
    "--metrics-out other.json --save-model other": None,  # which rank 0 alone writes
}
JOB = """
import json, os, sys
from dataclasses import replace
from pathlib import Path

from common import cli, ranks
from common.errors import UsageError
from common.training import distributed
from tests.conftest import run_options
from version1_pytorch_baseline import tiny_llama_v1

import torch

flags, different = json.loads(sys.argv[1])
distributed.start("ddp", torch.device("cpu"), 600)
distributed.start = distributed.end = lambda *_: None  # all runs are of one group
said, rank = {}, ranks.here().rank
for case in different:

    def make_model(options):
        model = tiny_llama_v1.make_model(options)
        if rank and not case:
            model.layers[0].mlp.gate_proj = torch.nn.Linear(32, 3, bias=False)
        return model

    options = run_options(tiny_llama_v1, *flags, "--save-model", "model", *(case.split() if rank else ()))
    said[case] = None
    try:
        tiny_llama_v1.train(options, make_model)
    except UsageError as error:
        said[case] = (str(error), error.shared)
Path(f"said{rank}.json").write_text(json.dumps(said))
cli.command(lambda: 0)  # as every script ends
"""


def test_processes_that_would_train_something_different_are_refused(torchrun, tmp_path):
    for name in ("text", "other"):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {i}" for i in range(200)))
    (tmp_path / "job.py").write_text(JOB)
    flags = (*QUICK, "--data", "text.txt", "--vocab-size", "300", "--num-steps", "2")
    torchrun("job.py", json.dumps([flags, list(DIFFERENT)]))
    first, second = (json.loads((tmp_path / f"said{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and (tmp_path / "model/model.safetensors").exists()
    for case, message in DIFFERENT.items():
        assert first[case] is None if message is None else first[case][0].startswith(message) and first[case][1], case


ENDING = """
import atexit, os, sys, torch

from common import cli
from common.training import distributed

distributed.start("ddp" if "RANK" in os.environ else None, torch.device("cpu"), 600)
atexit.register(print, "Python ends")
distributed.end()
print("the last line")
cli.command(lambda: int(sys.argv[1]))
"""


@pytest.mark.parametrize("launch", [("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1), ()])
@pytest.mark.parametrize("code", [0, 1])
def test_a_process_with_threads_of_gloo_ends_without_pythons_end(run_script, tmp_path, launch, code):
    """One of these threads could abort it: "terminate called without an active exception", exit code -6."""
    (tmp_path / "job.py").write_text(ENDING)
    done = run_script(*launch, "job.py", code, check=code)
    assert "the last line" in done.stdout and ("Python ends" in done.stdout) == (not launch)


ONE_BOGUS = """
import os, pathlib, runpy, sys, time, torch

waits, init = pathlib.Path("waits"), torch.distributed.init_process_group
torch.distributed.init_process_group = lambda *given, **named: (waits.touch(), init(*given, **named))
if os.environ["RANK"] == "1":
    sys.argv.append("--bogus")
    while not waits.exists():
        time.sleep(0.01)
runpy.run_path({!r}, run_name="__main__")
"""


def test_a_bad_option_of_one_process_ends_the_others_at_once(torchrun, tmp_path):
    """The first waits in C++ for the second."""
    (tmp_path / "script.py").write_text(ONE_BOGUS.format(str(SCRIPT)))
    said = torchrun("script.py", *QUICK, check=1).stderr
    assert said.count("error: rank 1: unrecognized arguments: --bogus") == 1 and "Signal 15 (SIGTERM) received" in said


# --------------------------------------------------------------------------------------------------------- the environment


def test_a_process_of_its_own_starts_no_group():
    assert ranks.here() == ranks.Ranks(0, 0, 1, False)
    form = distributed.form(run_options(tiny_llama_v1))
    distributed.start(form, CPU, 600)
    assert form is None and not distributed.active()
    assert (distributed.gathered(3), distributed.anywhere(False, CPU)) == ([3], False)
    assert distributed.Meetings(CPU).agree(7, 15, 2.5) == (15, 2.5)


@pytest.mark.parametrize("flags, forms, message", [
    (["--capture-step"], ranks.FORMS, "--capture-step does not work with --parallel fsdp"),
    (["--enable-deepspeed-flops"], ranks.FORMS, "--enable-deepspeed-flops does not work with --parallel fsdp"),
    ([], ("ddp", "zero1"), "this script takes --parallel ddp or zero1"),
    ([], (), "this script runs in one process"),
])  # fmt: skip
def test_what_cannot_run_in_parallel_is_refused(as_rank, flags, forms, message):
    as_rank(0)
    with pytest.raises(ValueError, match=message):
        distributed.form(run_options(tiny_llama_v1, *QUICK, "--parallel", "fsdp", *flags), forms)


def test_several_processes_take_the_first_form_that_a_version_supports(as_rank):
    as_rank(1)
    options = run_options(tiny_llama_v1, *QUICK)
    assert (distributed.form(options), distributed.form(options, ("zero1",))) == ("ddp", "zero1")


@pytest.mark.parametrize("flag", ["--bogus", "--batch-size=0", "--parallel=zero3", "--data=nowhere.txt"])
def test_a_bad_option_is_one_line_with_the_rank(as_rank, monkeypatch, refused, flag):
    """The first process of a node says it at once, and others only if they are not ended meanwhile."""
    waited: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setattr(distributed, "start", lambda *_: None)
    monkeypatch.setattr(Run, "_announce_form", lambda _: None)
    for rank in (0, 1):
        as_rank(rank)
        assert refused(SCRIPT, *QUICK, flag).startswith(f"error: rank {rank}: ") and waited == [cli.GRACE] * rank


@pytest.mark.parametrize(
    "name, value", [("RANK", "abc"), ("RANK", "2"), ("LOCAL_RANK", ""), ("WORLD_SIZE", "0"), ("MASTER_PORT", "abc")]
)
def test_an_environment_that_names_no_process_is_refused(as_rank, monkeypatch, refused, name, value):
    as_rank(0)
    monkeypatch.setenv(name, value)
    said = refused(SCRIPT, *QUICK)
    assert f"{name}={value}" in said and said.endswith(": torchrun sets these variables; or unset them\n")


@pytest.mark.parametrize("rank, shared, said", [(0, True, "error: lost\n"), (1, True, ""), (1, False, "error: rank 1: lost\n")])
def test_an_error_that_all_have_is_shown_once_and_any_other_with_its_rank(as_rank, monkeypatch, capsys, rank, shared, said):
    def fail():
        raise RunError("lost", shared)

    monkeypatch.setattr(cli, "GRACE", 0)
    as_rank(rank)
    with pytest.raises(SystemExit) as ended:
        cli.command(fail)
    assert (ended.value.code, capsys.readouterr().err) == (1, said)


def test_the_first_process_alone_tells_of_progress(as_rank, monkeypatch):
    told, lines = threading.Event(), []
    line = SimpleNamespace(show=lambda text: (lines.append(text), told.set()), end=lambda: None)
    monkeypatch.setattr(progress, "Line", lambda _: line)
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    for rank, seconds in ((1, 0.1), (0, 300)):
        as_rank(rank)
        with progress.progress(f"rank {rank}"):
            told.wait(seconds)
    assert {line.split(":")[0] for line in lines} == {"rank 0"}


def test_a_captured_step_that_hangs_ends_its_process(monkeypatch, capsys):
    """The host waits for the GPU, which waits for another process; a thread notices that no meeting has been held."""
    codes, ended, over = [], threading.Event(), threading.Event()
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "PERIOD", 0.01)
    monkeypatch.setattr(distributed.os, "_exit", lambda code: (codes.append(code), ended.set(), over.wait()))
    never = distributed.Meetings(CPU)
    with never.watched(True, 0.2), never.paused():  # for a checkpoint
        ended.wait(0.5)
    for captured, timeout, seconds in ((True, 600, 0.3), (False, 0.05, 0.3), (True, 0.05, 300)):
        assert codes == []
        with distributed.Meetings(CPU).watched(captured, timeout):
            ended.wait(seconds)
    over.set()  # the thread has not ended the process, and finds that the step has ended
    assert codes == [1] and "error: rank 0: no answer from another process for 0.05 s" in capsys.readouterr().err


def test_forward_passes_are_compared_in_the_precision_of_the_run_and_a_slow_rank_is_above_the_median():
    computed = []
    model = SimpleNamespace(loss=lambda x, y: computed.append((x @ y).dtype))
    distributed.forward_ms(model, (torch.ones(2, 2), torch.ones(2, 2)), Precision(CPU, torch.bfloat16))
    assert computed == [torch.bfloat16] * distributed.FORWARD_PASSES

    assert distributed.slow_ranks([10, 10.5, 9.8, 10.9]) == []
    (line,) = distributed.slow_ranks([10, 10.5, 14.3, 9.8])
    assert line.startswith("rank 2 took 1.4 times the median")
    assert [line[:6] for line in distributed.slow_ranks([10, 14])] == ["rank 1"]


# -------------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", ["ddp", "zero1"])
def test_a_captured_step_trains_as_an_eager_one_on_two_gpus(torchrun, tmp_path, form):
    losses = []
    for capture in ("--capture-step", "--no-capture-step"):
        flags = [*TINY, "--data", "synthetic", "--num-steps", "20", "--parallel", form, capture]
        torchrun(SCRIPT, *flags, NCCL_NVLS_ENABLE="0")
        losses.append(record(tmp_path)["loss"]["all"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and all(map(math.isfinite, losses[0]))
