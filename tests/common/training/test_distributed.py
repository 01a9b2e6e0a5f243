"""Training in several processes: torchrun starts two, on gloo, as a user would."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from common import cli, progress, ranks
from common.errors import RunError
from common.precision import Precision
from common.training import distributed
from tests.conftest import PATHS, ROOT, TINY, V1, altered_version, run_options
from version1_pytorch_baseline import tiny_llama_v1
from version3_triton import kernels as third_kernels

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "12", "--device", "cpu")
CPU = torch.device("cpu")


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """torchrun(script, *arguments, check=0, **variables): two processes in tmp_path, on the CPU unless variables are given."""

    def run(*arguments: object, check: int = 0, **variables: str) -> subprocess.CompletedProcess:
        variables = variables or {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launcher, *map(str, arguments)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATHS} | variables,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == check, f"{done.stdout}\n{done.stderr}"
        return done

    return run


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
    "silent": ("time.sleep(600)", ["--distributed-timeout", "5"]),  # torchrun gives it 30 s to end by itself
}


@pytest.mark.parametrize("death", ["killed", *(pytest.param(name, marks=pytest.mark.slow) for name in list(DEATHS)[1:])])
def test_a_process_that_dies_ends_the_job_and_the_record_is_kept(torchrun, tmp_path, death):
    what, flags = DEATHS[death]
    said = torchrun(doing(tmp_path, what), *QUICK, *flags, "--metrics-out", "metrics_v1.json", check=1).stderr
    if death == "silent":  # otherwise torchrun may stop the first process before it has said so
        assert "error: rank 0: another process has ended, or has not answered for 5 s" in said
    assert ("error: rank 1: out of memory" in said) == (death == "out of memory")
    assert "Traceback" not in said.split("torch/distributed/run.py")[0].replace("Traceback (most recent call last):\n", "", 1)
    measured = record(tmp_path)
    assert measured["status"].startswith("failed: another process has ended") and len(measured["loss"]["all"]) < 5


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


def test_moments_that_version_4_shares_out_are_whole_in_a_checkpoint(torchrun, execute, monkeypatch, tmp_path):
    """Two processes train four steps under zero1, and one the rest; one alone trains them all."""
    monkeypatch.setattr(third_kernels, "INTERPRETED", False)  # as in the two processes: PyTorch's operations
    script = ROOT / "version4_ultra_fused/tiny_llama_v4.py"
    flags = (*QUICK, "--metrics-out", "metrics_v1.json")
    torchrun(script, *flags, "--num-steps", 4, "--parallel", "zero1", "--checkpoint-dir", "saved")
    losses = record(tmp_path)["loss"]["all"]
    execute(script, *flags, "--batch-size", 4, "--num-steps", 8, "--checkpoint-dir", "saved", "--resume")
    losses += record(tmp_path)["loss"]["all"]
    execute(script, *flags, "--batch-size", 4, "--num-steps", 8)
    assert losses == pytest.approx(record(tmp_path)["loss"]["all"], abs=1e-5) and len(losses) == 8


# --------------------------------------------------------------------------------------------------------- the environment


def test_a_process_of_its_own_starts_no_group():
    assert ranks.here() == ranks.Ranks(0, 0, 1, False)
    form = distributed.form(run_options(tiny_llama_v1))
    distributed.start(form, CPU, 600)
    assert form is None and not distributed.active()
    assert (distributed.gathered(3), distributed.anywhere(False, CPU)) == ([3], False)
    assert distributed.Meetings(CPU).agree(7, 15, 2.5) == (15, 2.5)


@pytest.mark.parametrize(
    "flags, forms, message",
    [
        (["--capture-step"], ranks.FORMS, "--capture-step does not work with --parallel fsdp"),
        (["--enable-deepspeed-flops"], ranks.FORMS, "--enable-deepspeed-flops does not work with --parallel fsdp"),
        ([], ("ddp", "zero1"), "this script takes --parallel ddp or zero1"),
        ([], (), "this script runs in one process"),
    ],
)
def test_what_cannot_run_in_parallel_is_refused(as_rank, flags, forms, message):
    as_rank(0)
    with pytest.raises(ValueError, match=message):
        distributed.form(run_options(tiny_llama_v1, *QUICK, "--parallel", "fsdp", *flags), forms)


def test_several_processes_take_the_first_form_that_a_version_supports(as_rank):
    as_rank(1)
    options = run_options(tiny_llama_v1, *QUICK)
    assert (distributed.form(options), distributed.form(options, ("zero1",))) == ("ddp", "zero1")


@pytest.mark.parametrize("flag", ["--bogus", "--batch-size=0", "--parallel=zero3"])
def test_a_bad_option_is_one_line_of_one_process(as_rank, execute, flag):
    as_rank(0)
    assert execute(SCRIPT, *QUICK, flag, check=2).err.count("\n") == 1
    as_rank(1)
    printed = execute(SCRIPT, *QUICK, flag, check=2)
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize("rank, shared, said", [(0, True, "error: lost\n"), (1, True, ""), (1, False, "error: rank 1: lost\n")])
def test_an_error_that_all_have_is_shown_once_and_any_other_with_its_rank(as_rank, capsys, rank, shared, said):
    def fail():
        raise RunError("lost", shared)

    as_rank(rank)
    with pytest.raises(SystemExit) as ended:
        cli.command(fail)
    assert (ended.value.code, capsys.readouterr().err) == (1, said)


def test_the_first_process_alone_tells_of_progress(as_rank, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.01)

    for rank in (1, 0):
        as_rank(rank)
        with progress.progress(f"rank {rank}"):
            time.sleep(0.1)
    assert {line.split(":")[0] for line in capsys.readouterr().err.splitlines()} == {"rank 0"}


def test_a_captured_step_that_hangs_ends_its_process(monkeypatch, capsys):
    """The host waits for the GPU, which waits for another process; a thread notices that no meeting has been held."""
    codes = []
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "PERIOD", 0.01)
    monkeypatch.setattr(distributed.os, "_exit", codes.append)
    for captured, timeout in ((True, 600), (False, 0.05), (True, 0.05)):
        assert codes == []
        with distributed.Meetings(CPU).watched(captured, timeout):
            time.sleep(0.3)
    assert set(codes) == {1} and "error: rank 0: no answer from another process for 0.05 s" in capsys.readouterr().err


def test_the_forward_passes_that_are_compared_have_the_precision_of_the_run():
    computed = []
    model = SimpleNamespace(loss=lambda x, y: computed.append((x @ y).dtype))
    distributed.forward_ms(model, (torch.ones(2, 2), torch.ones(2, 2)), Precision(CPU, torch.bfloat16))
    assert computed == [torch.bfloat16] * distributed.FORWARD_PASSES


def test_a_slow_rank_is_one_above_the_median_of_all():
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
