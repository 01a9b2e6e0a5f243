"""The search for a batch size: its logic on made-up machines, trials in processes of their own, and the script."""

import argparse
import csv
import math
import subprocess
import sys
from pathlib import Path

from common import device as devices
from common.errors import RunError, UsageError
from common.files import read_json, write_json
from common.studies import batch_size
from common.studies.batch_size import FITS, OUT, OVER, Trial
from common.training import version_files
from tests.conftest import PATHS, ROOT

import pytest
import torch

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "optimize_batch_size.py"
SMALL = """
model: {hidden_size: 32, num_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48, vocab_size: 50}
training: {sequence_length: 8}
"""


class Machine:
    """Steps of fixed + per_sample B ms, at least `least`; more than `room` samples are out of memory, `allowed` over target."""

    def __init__(self, fixed=0.0, per_sample=1.0, least=0.0, room=math.inf, allowed=math.inf):
        self.time = lambda size: max(fixed + per_sample * size, least)
        self.room, self.allowed, self.sizes = room, allowed, []

    def __call__(self, size: int) -> Trial:
        assert size not in self.sizes, "tried twice"
        self.sizes.append(size)
        if size > self.room:
            return Trial(size, OUT)
        step = {"median": self.time(size), "p20": self.time(size), "p80": self.time(size), "count": 5}
        return Trial(size, OVER if size > self.allowed else FITS, step, size / step["median"], 100.0 + size)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 64, 100, 127, 1000])
@pytest.mark.parametrize("kind", ["room", "allowed"])
def test_memory_finds_the_largest_that_fits_to_a_sixteenth(limit, kind):
    machine = Machine(**{kind: limit})
    found = batch_size.search(machine, "memory", 4096)
    assert found.batch_size <= limit < found.batch_size + max(1, found.batch_size // batch_size.RESOLUTION)
    assert [trial.batch_size for trial in found.trials] == machine.sizes and len(machine.sizes) < 18
    status = OUT if kind == "room" else OVER
    assert f"does not fit: {status}" in found.ended and found.reason.endswith(f"does not: {status}")


def test_memory_without_a_limit_ends_at_the_maximum():
    machine = Machine()
    found = batch_size.search(machine, "memory", 100)
    assert machine.sizes == [1, 2, 4, 8, 16, 32, 64, 100] and found.batch_size == 100
    assert found.ended == "the maximum is reached: 100 (--max-batch-size)" and "limit lies above" in found.reason


@pytest.mark.parametrize("target", batch_size.TARGETS)
def test_a_step_that_takes_long_ends_the_doubling(target):
    machine = Machine(least=10.0, fixed=-90.0, per_sample=50.0)  # 10 ms, then 110 ms at 4 and 310 ms at 8
    found = batch_size.search(machine, target, 4096, longest=0.3)
    assert max(machine.sizes) == 8 and found.trials[2].step_ms["median"] == 110
    if target == "memory":
        assert found.ended == "a step of batch size 8 takes 0.31 s, more than 0.3 (--max-step-seconds)" and found.batch_size == 8


@pytest.mark.parametrize("fixed", [0.5, 3.0, 20.0])
def test_throughput_ends_at_the_plateau_with_the_share_that_is_derived(fixed):
    machine = Machine(fixed)
    found = batch_size.search(machine, "throughput", 2**20)
    assert "have not raised the throughput by 2 %" in found.ended
    rates = {size: size / machine.time(size) for size in machine.sizes}  # the ceiling is 1
    last = max(machine.sizes)
    assert rates[last // 4] * 1.02 > rates[last] > 0.993 and rates[last // 8] * 1.02 <= rates[last // 2]
    assert rates[found.batch_size] >= 0.98 * max(rates.values())
    smaller = [size for size in rates if size < found.batch_size]
    assert all(rates[size] < 0.98 * max(rates.values()) for size in smaller)
    assert found.batch_size - max(smaller, default=0) <= max(1, found.batch_size // 16)


def test_throughput_that_rises_to_the_end_of_the_memory_is_looked_for_there():
    machine = Machine(fixed=1e6, room=100)
    found = batch_size.search(machine, "throughput", 4096)
    assert found.ended == f"batch size 128 does not fit: {OUT}"
    assert 88 <= found.batch_size <= 100 and 96 in machine.sizes


def test_throughput_passes_over_a_slow_size():
    machine = Machine(fixed=10.0)
    smooth = machine.time
    machine.time = lambda size: smooth(size) * (3 if size == 8 else 1)
    assert batch_size.search(machine, "throughput", 64).batch_size > 8


@pytest.mark.parametrize("free", [1, 5, 32, 100])
def test_latency_finds_the_samples_that_cost_nothing(free):
    machine = Machine(least=free)  # a step takes `free` ms up to as many samples
    found = batch_size.search(machine, "latency", 4096)
    assert 0.9 * free <= found.batch_size <= 1.02 * free
    assert "have not kept the step time within 2 % of the fastest" in found.ended and max(machine.sizes) <= 8 * free


def test_latency_ends_with_the_memory_too():
    found = batch_size.search(Machine(least=1000.0, room=20), "latency", 4096)
    assert found.batch_size == 20 and found.ended == f"batch size 32 does not fit: {OUT}"


@pytest.mark.parametrize("target", batch_size.TARGETS)
def test_a_machine_too_small_for_one_sample(target):
    with pytest.raises(RunError, match="not even batch size 1 fits .*lower --seq-len, take a smaller --preset"):
        batch_size.search(Machine(room=0), target, 4096)


@pytest.mark.parametrize("target", batch_size.TARGETS)
def test_a_maximum_of_one_is_one_trial(target):
    machine = Machine()
    assert batch_size.search(machine, target, 1).batch_size == 1 and machine.sizes == [1]


# ------------------------------------------------------------------------------------------------------------- trials


def options(folder: Path, *flags: str):
    (folder / "small.yaml").write_text(SMALL)
    parser = version_files.parser(None, batch_size=False)
    parsed = version_files.resolve(parser.parse_args(["--config", str(folder / "small.yaml"), "--device", "cpu", *flags]))
    parsed.target_memory_usage, parsed.optimization_target, parsed.max_batch_size = 1.0, "memory", 2
    parsed.max_step_seconds = None
    return parsed


def altered(folder: Path, statement: str) -> Path:
    """Version 2 with a statement at the beginning of every training step."""
    start = "    with precision.autocast():\n"
    source = (V2 / "tiny_llama_v2.py").read_text()
    assert source.count(start) == 1
    (folder / "tiny_llama_altered.py").write_text(source.replace(start, f"    {statement}\n{start}"))
    return folder / "tiny_llama_altered.py"


def test_a_trial_that_the_kernel_kills_does_not_end_the_search(tmp_path, capsys):
    version = version_files.load(altered(tmp_path, "if len(batch[0]) > 1: os.kill(os.getpid(), 9)"))
    measured = batch_size.measure(version, options(tmp_path), [])
    assert [(trial["batch_size"], trial["status"]) for trial in measured["trials"]] == [(1, FITS), (2, OUT)]
    assert measured["batch_size"] == 1 and measured["version"] == "altered" and measured["memory_kind"] == "process RSS"
    assert "batch size     2  out of memory\n" in capsys.readouterr().out


def test_an_allocator_that_refuses_is_out_of_memory(tmp_path):
    version = version_files.load(altered(tmp_path, "raise torch.OutOfMemoryError('CUDA out of memory')"))
    with pytest.raises(RunError, match="not even batch size 1 fits .out of memory."):
        batch_size.measure(version, options(tmp_path), [])


def test_any_other_failure_ends_it_with_its_message(tmp_path, capfd):
    version = version_files.load(altered(tmp_path, "raise ValueError('a mistake in the version')"))
    with pytest.raises(RunError, match="trial of batch size 1 failed, exit code 1"):
        batch_size.measure(version, options(tmp_path), [])
    assert "a mistake in the version" in capfd.readouterr().err


def test_each_trial_has_a_peak_of_its_own(tmp_path):
    path = altered(tmp_path, "kept = torch.ones(2**26) if len(batch[0]) == 1 else None")  # 256 MiB
    measured = batch_size.measure(version_files.load(path), options(tmp_path), [])
    peaks = {trial["batch_size"]: trial["peak_mib"] for trial in measured["trials"]}
    assert peaks.keys() == {1, 2} and peaks[1] - peaks[2] == pytest.approx(256, abs=40)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_an_allocation_past_the_limit_is_out_of_memory():
    code = (
        "import torch; from common import device as d; cpu = torch.device('cpu'); d.limit_memory(cpu, 4096)\n"
        "torch.ones(2**26)\n"
        "try: torch.ones(2**31)\n"
        "except Exception as error: print(d.is_out_of_memory(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": PATHS}, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("CUDA error: out of memory\nCompile with ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
    ids=["driver", "blas", "other"],
)
def test_what_out_of_memory_looks_like(error, expected):
    assert devices.is_out_of_memory(error) == expected


def test_limits_of_control_groups(tmp_path):
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "memory/old").mkdir(parents=True)
    (tmp_path / "job/memory.max").write_text("2000\n")
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "memory/old/memory.limit_in_bytes").write_text("3000\n")
    (tmp_path / "own").write_text("5:cpu:/old\n4:memory:/old\n0::/job/step\n")
    assert sorted(devices._cgroup_limits(tmp_path / "own", tmp_path)) == [2000, 3000]
    assert devices._cgroup_limits(tmp_path / "none", tmp_path) == []


def test_memory_of_a_cpu_is_what_its_group_allows(monkeypatch):
    whole = devices.describe(torch.device("cpu"))["memory_mib"]
    monkeypatch.setattr(devices, "_cgroup_limits", lambda: [2**29, 2**60])
    assert devices.describe(torch.device("cpu"))["memory_mib"] == 512 < whole


# ------------------------------------------------------------------------------------------------------------- script


def test_a_share_is_above_0_and_at_most_1():
    assert [batch_size.share(text) for text in ("0.8", "1", "1e-3")] == [0.8, 1.0, 0.001]
    for text in ("0", "-0.1", "1.01", "nan", "inf", "much", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="above 0 and at most 1"):
            batch_size.share(text)


def test_the_script_as_documented(run_script, tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    arguments = (
        "--target-memory-usage",
        "0.8",
        "--seq-len",
        "8",
        "--optimization-target",
        "throughput",
        "--config",
        "small.yaml",
    )
    done = run_script(SCRIPT, *arguments, "--max-batch-size", "2", "--disable-flash-attention", "--use-amp")
    folder = tmp_path / "batch_size_search"
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv", ".json", ".md", ".png"]
    measured = read_json(folder / "batch_search.json", batch_size.SCHEMA)
    assert measured["settings"] == {"qkv": True, "flash_attention": False, "swiglu": True, "torch_compile": False}
    assert measured["precision"] == {"compute": "bf16"} and measured["target_memory_usage"] == 0.8
    answer = next(trial for trial in measured["trials"] if trial["batch_size"] == measured["batch_size"])
    assert answer["tokens_per_second"] == pytest.approx(answer["batch_size"] * 8 / answer["step_ms"]["median"] * 1e3)
    for text in (done.stdout, (folder / "batch_search.md").read_text()):
        assert f"Batch size for throughput: {measured['batch_size']}. It is the smallest batch size tried within 2 %" in text
        assert "Doubling ended: " in text and "v2 (qkv, swiglu on)" in text
    rows = list(csv.DictReader((folder / "batch_search.csv").open()))
    assert [int(row["batch_size"]) for row in rows] == sorted(trial["batch_size"] for trial in measured["trials"])
    share = 100 * float(rows[0]["peak_mib"]) / measured["device"]["memory_mib"]
    assert float(rows[0]["memory_percent"]) == pytest.approx(share) and rows[0]["status"] == FITS


def test_a_report_with_trials_out_of_memory(tmp_path):
    found = batch_size.search(Machine(room=20, allowed=10), "memory", 4096)
    measured = {
        "schema": batch_size.SCHEMA, "command": "optimize_batch_size.py", "date": "2026-11-21T00:00:00Z", "version": "v1",
        "device": {"name": "a GPU", "memory_mib": 200.0}, "environment": {"torch": "2.13.0"}, "settings": {},
        "model": {"hidden_size": 1, "num_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
                  "intermediate_size": 1, "vocab_size": 1},
        "training": {"sequence_length": 8, "seed": 0}, "precision": {"compute": "fp32"}, "memory_kind": "GPU allocator",
        "target": "memory", "target_memory_usage": 0.55, "trials": [trial._asdict() for trial in found.trials],
        "ended": found.ended, "batch_size": found.batch_size, "reason": found.reason,
    }  # fmt: skip
    measured["trials"].append(Trial(64, OUT)._asdict())
    write_json(tmp_path / "batch_search.json", measured)
    text = batch_size.analyze(tmp_path / "batch_search.json", tmp_path)
    lines = [line.split() for line in text.splitlines()]
    assert ["10", "10", "10", "10", "1", "110", "55", "ok,", "chosen"] in lines
    assert ["64", "out", "of", "memory"] in lines and ["16", "16", "16", "16", "1", "116", "58", "over", "target"] in lines
    assert "The target is at most 55 % of the memory." in text and "v1, a GPU" in text
    assert list(csv.DictReader((tmp_path / "batch_search.csv").open()))[-1]["ms"] == ""
    assert (tmp_path / "batch_search.png").read_bytes()[:4] == b"\x89PNG"


def test_not_even_one_sample_fits(run_script, tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    done = run_script(SCRIPT, "--config", "small.yaml", "--target-memory-usage", "1e-6", check=1)
    assert done.stderr.startswith("error: not even batch size 1 fits (over target): lower --seq-len")
    assert not list((tmp_path / "batch_size_search").iterdir())


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--target-memory-usage", "1.01"], "above 0 and at most 1"),
        (["--optimization-target", "speed"], "invalid choice: 'speed'"),
        (["--max-batch-size", "0"], "not a positive whole number"),
        (["--max-step-seconds", "0.5"], "not a positive whole number"),
        (["--output-dir", "/proc/nowhere"], "--output-dir: cannot write"),
        (["--batch-size", "8"], "takes no --batch-size"),
        (["--torch-compile-mode", "default"], "needs --enable-torch-compile"),
        (["--seq-len", "-1"], "sequence_length"),
    ],
)
def test_bad_input_is_one_line(refused, arguments, named):
    assert named in refused(SCRIPT, *arguments)


def test_another_file_is_refused(tmp_path):
    write_json(tmp_path / "other.json", {"schema": "tiny-llama-run/1"})
    with pytest.raises(UsageError, match="tiny-llama-batch-search/1"):
        batch_size.analyze(tmp_path / "other.json", tmp_path)
