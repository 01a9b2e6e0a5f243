"""tiny_llama_v1.py and the run behind it as a user meets them: outputs, exit codes, one-line errors, interruptions."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from common import cli
from common.errors import RunError
from common.files import write_json
from common.training import run
from tests.conftest import PATHS, TINY, V1
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "4")


def test_a_run_prints_a_summary_and_writes_its_record(run_script, tmp_path):
    done = run_script(SCRIPT, *QUICK, "--time-phases", "--metrics-out", "out/metrics.json")
    record = json.loads((tmp_path / "out/metrics.json").read_text())
    assert record["schema"] == "tiny-llama-run/1" and record["status"] == "completed"
    assert len(record["loss"]["all"]) == len(record["step_ms"]["all"]) == 4
    assert record["step_ms"]["p20"] <= record["step_ms"]["median"] <= record["step_ms"]["p80"]
    assert record["tokens_per_second"] == pytest.approx(2 * 16 / record["step_ms"]["median"] * 1e3)
    assert set(record["phases_ms"]) == {"forward", "backward", "optimizer"}
    assert record["memory"]["peak_mib"] > 0 and record["parameters"] > 0
    assert f"{record['step_ms']['median']:.2f} ms" in done.stdout
    assert "entropy of the source" in done.stdout, "the floor of synthetic data stands beside the loss"


def test_same_seed_same_bits_other_seed_other_losses(run_script, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_script(SCRIPT, *QUICK, "--seed", seed, "--metrics-out", f"{name}.json")
    losses = {name: json.loads((tmp_path / f"{name}.json").read_text())["loss"]["all"] for name in "abc"}
    assert losses["a"] == losses["b"] != losses["c"]


def test_it_learns_the_synthetic_source(run_script, tmp_path):
    run_script(SCRIPT, *TINY, "--vocab-size", 64, "--data", "synthetic", "--num-steps", 200, "--learning-rate", 1e-2)
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    losses, floor = record["loss"]["all"], record["data"]["entropy_floor"]
    assert losses[0] == pytest.approx(math.log(64), abs=0.5)
    assert floor < sum(losses[-20:]) / 20 < (floor + math.log(64)) / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_trains_like_fp32(run_script, tmp_path, dtype):
    run_script(SCRIPT, *QUICK, "--metrics-out", "fp32.json")
    run_script(SCRIPT, *QUICK, "--use-amp", "--amp-dtype", dtype, "--metrics-out", "amp.json")
    full, mixed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("fp32", "amp"))
    assert mixed["precision"]["compute"] == {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert mixed["loss"]["all"] == pytest.approx(full["loss"]["all"], abs=0.02)
    assert mixed["loss"]["all"] != full["loss"]["all"]


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_short_run_shortens_the_profile_and_still_writes_a_trace(run_script, tmp_path, steps):
    run_script(SCRIPT, *QUICK, "--num-steps", steps, "--enable-pytorch-profiler", "--profile-dir", "profiles")
    (profile,) = (tmp_path / "profiles").glob("profile_*.json")
    content = json.loads(profile.read_text())
    assert content["profiled_steps"] == len(content["step_us"]) >= 1
    assert (tmp_path / "profiles" / content["trace"]).exists()
    assert {"attention", "mlp", "norm", "loss", "embed", "optimizer"} <= {row["span"] for row in content["operators"]}


def test_everything_profiled_at_once(run_script, tmp_path):
    done = run_script(SCRIPT, *QUICK, "--enable-all-profiling", "--validate-setup", "--sort-by", "cpu_memory_usage")
    profiles = tmp_path / "pytorch_profiles"
    page = (profiles / "memory_timeline.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "setup ok" in done.stdout and "MiB allocated" in done.stdout
    flops = json.loads((tmp_path / "flops_analysis/flops_profile.json").read_text())
    assert {row["counter"] for row in flops["counts"]} >= {"formula, causal", "formula, full S x S", "FlopCounterMode"}


def test_attention_only_keeps_nothing_else(run_script, tmp_path):
    run_script(SCRIPT, *QUICK, "--profile-attention-only", "--enable-pytorch-profiler")
    (profile,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    content = json.loads(profile.read_text())
    assert content["attention_only"] and {row["span"] for row in content["operators"]} == {"attention"}
    assert {row["phase"] for row in content["operators"]} == {"forward", "backward"}


def test_tensorboard_serves_what_the_profile_wrote(run_script, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_script(SCRIPT, *QUICK, "--profile-memory", "--metrics-out", "metrics.json")
    (folder,) = (path for path in (tmp_path / "pytorch_profiles").iterdir() if path.is_dir())
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx(json.loads((tmp_path / "metrics.json").read_text())["loss"]["all"], rel=1e-6)
    assert {"train/step_ms", "train/tokens_per_second", "result/peak_memory_mib"} <= set(events.Tags()["scalars"])
    assert {"profile/time by span", "profile/memory"} <= set(events.Tags()["images"])
    assert "profile/top operators/text_summary" in events.Tags()["tensors"]


BAD_INPUT = {
    "heads that do not divide": (
        ["--hidden-dim", 30, "--num-heads", 4],
        "hidden_size 30 is not divisible by num_attention_heads 4",
    ),
    "kv heads that do not divide": (["--num-heads", 4, "--num-kv-heads", 3], "4 is not divisible by num_key_value_heads 3"),
    "odd head dimension": (["--hidden-dim", 12, "--num-heads", 4], "odd"),
    "no batch": (["--batch-size", 0], "batch_size = 0"),
    "negative steps": (["--num-steps", -1], "num_steps = -1"),
    "zero learning rate": (["--learning-rate", 0], "learning_rate = 0"),
    "unknown sort key": (["--sort-by", "bogus"], "bogus"),
    "precision without autocast": (["--amp-dtype", "float16"], "no effect without --use-amp"),
    "sort by memory that is not recorded": (["--profile-operators", "--sort-by", "cpu_memory_usage"], "--profile-memory"),
    "no GPU": (["--device", "cuda"], "PyTorch sees no GPU"),
    "unknown flag": (["--bogus"], "--bogus"),
    "missing config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "missing text": (["--data", "nowhere.txt"], "nowhere.txt"),
    "profile folder below a file": (["--profile-dir", "file/below"], "--profile-dir"),
    "metrics folder below a file": (["--metrics-out", "file/below.json"], "--metrics-out"),
    "model folder below a file": (["--save-model", "file/below"], "--save-model"),
    "vocabulary smaller than a byte": (["--data", "file", "--vocab-size", 100], "at least 256"),
    "text too short": (["--data", "file", "--vocab-size", 300], "too few for a sequence length"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(refused, tmp_path, case):
    arguments, named = BAD_INPUT[case]
    (tmp_path / "file").write_text("too short")
    assert named in refused(SCRIPT, *arguments)
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "pytorch_profiles"}, "nothing is left half-written"


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(run_script, tmp_path):
    done = run_script(SCRIPT, *QUICK, "--num-steps", 20, "--learning-rate", 1e30, check=1)
    assert "the loss is" in done.stderr and "step" in done.stderr and "Traceback" not in done.stderr
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert record["status"].startswith("failed: the loss is") and all(math.isfinite(loss) for loss in record["loss"]["all"])


def test_an_error_in_the_middle_keeps_the_steps_before_it(monkeypatch, tmp_path, capsys):
    """Out of memory at step 8, when nothing has been printed since step 5."""
    real, calls = tiny_llama_v1.train_step, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_llama_v1, "train_step", failing)
    with pytest.raises(SystemExit) as exit_code:
        run.main(tiny_llama_v1, [*QUICK, "--num-steps", "20", "--log-every", "5"])
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert exit_code.value.code == 1 and "lower --batch-size" in capsys.readouterr().err
    assert (
        record["status"].startswith("failed: out of memory") and len(record["loss"]["all"]) == len(record["step_ms"]["all"]) == 7
    )


def test_out_of_memory_says_what_to_lower(tmp_path):
    limited = (  # to 2 GiB more than PyTorch itself takes of the address space, which is much where it was built for a GPU
        "import resource, runpy, sys, torch;"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 2 * 2**30;"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size));"
        f"sys.argv = ['tiny_llama_v1.py', '--batch-size', '4096', '--seq-len', '512', '--data', 'synthetic', '--device', 'cpu'];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    environment = os.environ | {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", limited], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "lower --batch-size or --seq-len (now 4096 and 512)" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_measured(tmp_path, kind):
    environment = os.environ | {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    arguments = [*TINY, "--data", "synthetic", "--num-steps", "100000", "--log-every", "1"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(kind)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + kind
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert record["status"] == "interrupted" and 1 <= len(record["loss"]["all"]) < 100000
    assert "interrupted" in rest


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """stopped(step, *flags): a run of eight steps with three of them profiled gets SIGTERM in a step; its options."""

    def stop(number: int, *flags: str):
        own = ["--num-steps", "8", "--profile-steps", "3", "--profile-dir", "profiles", *flags]
        options = cli.parse(run.parser(tiny_llama_v1).parse_args([*TINY, "--data", "synthetic", *own]))
        real, done = tiny_llama_v1.train_step, []

        def step(*arguments):
            done.append(real(*arguments))
            if len(done) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return done[-1]

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tiny_llama_v1, "train_step", step)
        assert run.train(tiny_llama_v1, options) == 128 + signal.SIGTERM
        return options

    return stop


def test_a_run_that_is_stopped_while_it_is_profiled_keeps_whole_steps_only(stopped, tmp_path):
    """In the second of three profiled steps: two steps are in the profile, with as many products each."""
    layers = stopped(7, "--enable-pytorch-profiler").model.num_layers
    [path] = (tmp_path / "profiles").glob("profile_*.json")
    profile = json.loads(path.read_text())
    products = sum(row["calls"] for row in profile["operators"] if row["name"] == "aten::mm")
    assert profile["profiled_steps"] == 2 and products == 2 * 3 * (7 * layers + 1)


def test_a_run_that_is_stopped_before_it_is_profiled_has_no_profile(stopped, tmp_path):
    stopped(5, "--profile-memory")  # in the profiler's warm-up
    assert not list((tmp_path / "profiles").glob("profile_*"))


def test_handlers_that_were_there_before_python_are_no_obstacle(monkeypatch):
    """rocprofv3 installs its own in C; of those Python says None, and cannot put them back."""
    real = signal.signal
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(run.signal, "signal", lambda kind, handler: real(kind, handler) and None)
    try:
        with run.signals_noted() as received:
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for kind, handler in before.items():
            real(kind, handler)


def test_what_fails_after_the_training_loses_no_measurement(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = cli.parse(run.parser(tiny_llama_v1).parse_args([*QUICK, "--save-model", "model", "--time-phases"]))
    monkeypatch.setattr(run, "phase_times", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(RunError, match="out of memory: lower"):
        run.train(tiny_llama_v1, options)
    assert len(json.loads((tmp_path / "metrics_v1.json").read_text())["loss"]["all"]) == 4
    (tmp_path / "model/model.safetensors").unlink()
    (tmp_path / "model/model.safetensors").mkdir()
    with pytest.raises(RunError, match="cannot write model/model.safetensors"):
        run.train(tiny_llama_v1, options)


@pytest.mark.parametrize("name", ["", ".", "folder", "/dev/null"])
def test_a_record_goes_into_a_file_and_nothing_else(refused, tmp_path, name):
    (tmp_path / "folder").mkdir()
    assert "--metrics-out" in refused(SCRIPT, *QUICK, "--metrics-out", name)


def test_a_link_to_a_record_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "record.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "record.json").read_text()) == {"a": 1}


def test_a_full_disk_loses_no_measurement(tmp_path):
    def no_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # as if 200 bytes were left

    (tmp_path / "metrics_v1.json").write_text("the record of an earlier run")
    environment = os.environ | {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, QUICK)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        preexec_fn=no_room, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "cannot write metrics_v1.json" in done.stderr
    printed = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    assert len(json.loads(printed)["loss"]["all"]) == 4
    assert (tmp_path / "metrics_v1.json").read_text() == "the record of an earlier run"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics_v1.json"]


def test_deepspeed_flops_and_its_analysis(run_script, tmp_path):
    pytest.importorskip("deepspeed")
    script = V1 / "run_deepspeed_flops.py"
    run_script(script, *QUICK)
    shown = run_script(script, "--analyze-results", "flops_profile.json").stdout
    profile = json.loads((tmp_path / "flops_analysis/flops_profile.json").read_text())
    counts = {row["counter"]: row for row in profile["counts"]}
    assert counts["FlopCounterMode"]["step"] == counts["formula, full S x S"]["step"]
    assert counts["DeepSpeed"]["forward"] == pytest.approx(counts["FlopCounterMode"]["forward"], rel=0.03)
    assert counts["formula, causal"]["step"] < counts["formula, full S x S"]["step"]
    assert "DeepSpeed" in shown and (tmp_path / "flops_analysis/model_profile.txt").stat().st_size > 1000
    assert len((tmp_path / "flops_analysis/mfu_analysis.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    "content, named",
    [
        (None, "no missing.json here"),
        ("", "empty"),
        ("{", "cut off"),
        ("[]", "not a file of schema"),
        ('{"schema": "x"}', "found: x"),
    ],
)
@pytest.mark.parametrize(
    "script, flag", [("run_deepspeed_flops.py", "--analyze-results"), ("run_pytorch_profiler.py", "--analyze-existing")]
)
def test_analysis_of_what_is_not_a_result(refused, tmp_path, script, flag, content, named):
    if content is not None:
        (tmp_path / "missing.json").write_text(content)
    said = refused(V1 / script, flag, "missing.json")
    assert named in said or (content is None and "cannot read missing.json" in said)


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_existing_profiles_are_shown_without_running_anything(run_script, tmp_path):
    run_script(SCRIPT, *QUICK, "--enable-pytorch-profiler")
    (profile,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    before = files_below(tmp_path)
    shown = run_script(V1 / "run_pytorch_profiler.py", "--analyze-existing", profile).stdout
    assert "attention" in shown and "aten::mm" in shown and "profiled steps" in shown
    assert files_below(tmp_path) == before


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [(), ("--use-amp",)])
def test_same_bits_on_the_gpu(tmp_path, amp):
    for name in "ab":
        subprocess.run(
            [sys.executable, str(SCRIPT), "--num-steps", "20", "--device", "cuda", *amp, "--metrics-out", f"{name}.json"],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATHS}, check=True, timeout=300,
        )  # fmt: skip
    a, b = (json.loads((tmp_path / f"{name}.json").read_text())["loss"]["all"] for name in "ab")
    assert a == b and all(math.isfinite(loss) for loss in a)


@pytest.mark.gpu
def test_gpu_and_cpu_train_alike(tmp_path):
    assert torch.cuda.is_available()
    for device in ("cpu", "cuda"):
        subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, QUICK), "--device", device, "--metrics-out", f"{device}.json"],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATHS}, check=True, timeout=300,
        )  # fmt: skip
    cpu, gpu = (json.loads((tmp_path / f"{device}.json").read_text()) for device in ("cpu", "cuda"))
    assert gpu["loss"]["all"] == pytest.approx(cpu["loss"]["all"], abs=1e-4)
    assert gpu["memory"]["kind"] == "GPU allocator"
