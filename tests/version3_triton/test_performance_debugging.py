"""The performance-debugging exercise: every stage shows its symptom, its fix removes it, and the comparison says so.

Without a GPU the stages train in this process, with PyTorch's operations, and the kernels are tried in Triton's interpreter.
"""

import importlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common import cli, spans, timing
from common import device as devices
from common.errors import RunError, UsageError
from common.files import read_json, write_json
from common.training import run
from tests.conftest import PATHS, ROOT, TINY, runs_kernels

import pytest
import torch
import torch.nn.functional as F

FOLDER = ROOT / "version3_triton/exercises/performance_debugging"
RUN_ALL = FOLDER / "run_all_stages.sh"

import compare_stages
import diagnose
import stages

if importlib.util.find_spec("triton"):  # imported while the interpreter is asked for
    import norm_kernel
    import swiglu_kernel
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = (*TINY, "--num-kv-heads", "2", "--data", "synthetic", "--warmup-steps", "1", "--num-steps", "3", "--device", "cpu")
NAMES = {path.stem.split("_")[1]: path.stem for path in sorted(FOLDER.glob("v3_stage*.py"))}


@pytest.fixture
def train(tmp_path, monkeypatch) -> Callable[..., dict]:
    """train("stage1", *flags): the record of a run on the CPU, or with gpu=True on the GPU, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def train(name: str, *flags: str, gpu: bool = False) -> dict:
        with monkeypatch.context() as patch:
            for replaced in ("warm_up", "phase_times"):  # by stages, for good
                patch.setattr(run, replaced, getattr(run, replaced))
            if not gpu:
                patch.setattr(stages.kernels, "INTERPRETED", False)  # PyTorch's operations: kernels have tests of their own
            options, stage = parsed(name, *(() if gpu else SMALL), "--metrics-out", "metrics.json", *flags)
            assert stages.train(stage, options) == 0
        return read_json(tmp_path / "metrics.json")

    return train


def parsed(name: str, *flags: str):
    """Options and version of a stage."""
    stage = stages.of(importlib.import_module(NAMES[name]))
    return cli.parse(run.parser(stage).parse_args(flags)), stage


@pytest.fixture
def small_model(monkeypatch) -> Callable[..., torch.nn.Module]:
    """small_model("stage2", *flags): that stage's model on the CPU."""
    monkeypatch.setattr(stages.kernels, "INTERPRETED", False)

    def build(name: str, *flags: str) -> torch.nn.Module:
        options, stage = parsed(name, *SMALL, *flags)
        torch.manual_seed(0)
        return stage.make_model(options)

    return build


def test_there_are_six_stages():
    assert list(NAMES) == [f"stage{number}" for number in range(1, 7)]


def test_fixed_stages_train_as_version_3_does(train):
    real = train("stage5")
    assert real["stage"]["updated"] == real["stage"]["parameters"] and real["stage"]["caveat"] is None
    for name in ("stage1", "stage2", "stage4", "stage6"):
        fixed = train(name, "--fixed")
        assert fixed["stage"]["fixed"] and fixed["stage"]["updated"] == fixed["stage"]["parameters"]
        assert fixed["loss"]["all"] == pytest.approx(real["loss"]["all"], abs=1e-5), name


def test_the_harness_is_left_as_it_was(train):
    clock, check = timing.Clock, run.warm_up
    train("stage3")
    assert timing.Clock is clock and run.warm_up is check


# Stage 1


def test_without_initialisation_the_loss_starts_near_the_hidden_size(train):
    record = train("stage1", "--num-layers", "1")
    assert record["loss"]["all"][0] > record["loss"]["uniform"] + 10
    assert train("stage1", "--num-layers", "1", "--fixed")["loss"]["all"][0] < record["loss"]["uniform"] + 1


def test_diagnosis_leads_to_the_embedding(train, monkeypatch, capsys):
    monkeypatch.setattr(stages.kernels, "INTERPRETED", False)

    def diagnosed(*flags: str) -> dict[str, list[str]]:
        options, stage = parsed("stage1", *SMALL, "--diagnose", *flags)
        assert stages.train(stage, options) == 0
        return {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[3:]}

    broken, fixed = diagnosed(), diagnosed("--fixed")
    assert list(broken) == [
        "embed_tokens", "layers.0.self_attn", "layers.0.mlp", "layers.0", "layers.1.self_attn", "layers.1.mlp", "layers.1",
        "norm", "lm_head",
    ]  # fmt: skip
    std, weight = 2, 4
    assert float(broken["embed_tokens"][weight]) == pytest.approx(1, abs=0.05)
    assert float(fixed["embed_tokens"][weight]) == pytest.approx(math.sqrt(2 / 5 / 32), rel=0.05)
    assert float(broken["lm_head"][std]) > 3 * float(fixed["lm_head"][std])
    assert float(broken["norm"][std]) == pytest.approx(float(fixed["norm"][std]), abs=0.05)  # a norm hides what came before


def test_diagnosis_counts_what_is_not_a_number(small_model):
    model = small_model("stage5")
    model.layers[1].mlp.down_proj.weight.data[0] = math.nan
    rows = {row[0]: row for row in diagnose.statistics(model, torch.zeros(1, 8, dtype=torch.long))}
    assert rows["layers.0"][4] == 0 and rows["layers.1.mlp"][4] == 8 and rows["layers.1.mlp"][1] is not None
    assert rows["lm_head"][4] == 8 * 1000 and rows["lm_head"][1] is None
    assert not any(module._forward_hooks for module in model.modules())


# Stage 2


def operators(function: Callable) -> set[str]:
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("fixed", (False, True), ids=("broken", "fixed"))
def test_slow_strides_take_pytorchs_plain_attention(fixed):
    stage2 = importlib.import_module(NAMES["stage2"])
    q, k, v = (torch.randn(1, heads, 64, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2))
    called = operators(lambda: stage2.attention(q, k, v, fixed))
    assert ("aten::_scaled_dot_product_attention_math" in called) is not fixed
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(stage2.attention(q, k, v, fixed), reference, atol=1e-5, rtol=1e-4)


def test_the_slow_stage_computes_the_same(train):
    assert train("stage2")["loss"]["all"] == pytest.approx(train("stage2", "--fixed")["loss"]["all"], abs=1e-5)
    for preset in ("tiny", "medium"):
        assert parsed("stage2", "--preset", preset)[0].model.num_key_value_heads == 2


# Stage 3


class AsynchronousDevice:
    """The host needs 1 ms to ask for a phase, the device 10 ms to do it; a wait lets the host catch up."""

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self) -> None:
        self.host += 1e-3
        self.done = max(self.host, self.done) + 10e-3

    def synchronize(self, device: torch.device) -> None:
        self.host = max(self.host, self.done)

    def step(self, index: int) -> None:
        self.launch()
        for name in ("backward", "optimizer"):
            with spans.span(name):
                self.launch()


@pytest.mark.parametrize(("flags", "expected"), [((), 1.0), (("--fixed",), 11.0)], ids=("broken", "fixed"))
def test_phases_without_synchronisation_are_the_hosts(monkeypatch, train, flags, expected):
    device = AsynchronousDevice()
    options, stage = parsed("stage3", *SMALL, *flags)
    stage.prepare(options)
    monkeypatch.setattr(devices, "synchronize", device.synchronize)
    monkeypatch.setattr(stage.time, "perf_counter", lambda: device.host)
    times = run.phase_times(device.step, torch.device("cpu"))
    assert {name: values[-1] for name, values in times.items()} == pytest.approx(
        {"forward": expected, "backward": expected, "optimizer": expected}
    )


def test_on_a_cpu_the_stage_says_that_it_shows_nothing(train, capsys):
    record = train("stage3")
    assert set(record["phases_ms"]) == {"forward", "backward", "optimizer"}
    shown = capsys.readouterr()
    assert "note: a call returns when its work is done" in shown.err and "needs a GPU" in record["stage"]["caveat"]
    assert "  phases       " in shown.out


# Stage 4


def swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def test_own_dot_products_are_right_and_slow(monkeypatch):
    monkeypatch.setattr(stages.kernels, "INTERPRETED", False)
    stage4 = importlib.import_module(NAMES["stage4"])
    x, weight = torch.randn(2, 64, 128, device=DEVICE), torch.randn(512, 128, device=DEVICE)
    results = []
    for function in (stage4.FusedSwiGLU.apply, swiglu):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = function(*leaves)
        y.sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)
    if DEVICE.type == "cpu":
        naive, blas = (min(timing.benchmark(lambda f=f: f(x, weight), DEVICE, 1, 5)) for f in (stage4.FusedSwiGLU.apply, swiglu))
        assert naive > 2 * blas


def test_only_the_broken_stage_has_its_own_feed_forward(small_model):
    ids = torch.arange(16).view(1, 16)
    broken, fixed = small_model("stage4"), small_model("stage4", "--fixed")
    torch.testing.assert_close(broken(ids), fixed(ids), atol=1e-5, rtol=1e-4)
    used = [operators(lambda model=model: model.layers[0].mlp(torch.randn(1, 4, 32))) for model in (broken, fixed)]
    assert "FusedSwiGLU" in used[0] and "FusedSwiGLU" not in used[1]


@needs_triton
@runs_kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))
def test_the_naive_kernel(dtype):
    x, weight = torch.randn(1, 5, 150, device=DEVICE).to(dtype), torch.randn(6, 150, device=DEVICE).to(dtype)
    expected = swiglu(x.double(), weight.double())
    assert (swiglu_kernel.swiglu(x, weight) - expected).abs().max() < 4 * torch.finfo(dtype).eps * expected.abs().max()


# Stage 6


def test_the_harness_refuses_a_model_that_does_not_train(run_script):
    done = run_script(FOLDER / f"{NAMES['stage6']}.py", *SMALL, check=1)
    assert "error: this model does not train: 13 of 14 parameters get no usable gradient" in done.stderr
    assert done.stdout == ""


def test_without_the_check_one_parameter_is_trained(train):
    record, fixed = train("stage6", "--skip-check"), train("stage6", "--fixed")
    assert (record["stage"]["updated"], record["stage"]["parameters"]) == (1, 14) and record["status"] == "completed"
    assert record["stage"]["state_mib"] < fixed["stage"]["state_mib"]
    assert fixed["stage"]["state_mib"] == pytest.approx(2 * 4 * fixed["parameters"] / 2**20, rel=0.01)  # two moments in fp32
    assert record["loss"]["all"][0] == pytest.approx(fixed["loss"]["all"][0], abs=1e-5)  # the forward pass is right
    assert abs(record["loss"]["all"][2] - fixed["loss"]["all"][2]) > 1e-3


def test_it_learns_less(train):
    flags = ("--num-steps", "60", "--vocab-size", "64", "--learning-rate", "0.01", "--batch-size", "8")
    ends = [sum(train("stage6", *flags, flag)["loss"]["all"][-5:]) / 5 for flag in ("--skip-check", "--fixed")]
    assert ends[0] > ends[1] + compare_stages.LEARNING


def test_the_fix_is_checked(train):
    with pytest.raises(RunError, match="does not train"):
        train("stage6")
    train("stage6", "--fixed")


@needs_triton
def test_the_norms_kernel():
    x, weight = torch.randn(3, 100, device=DEVICE), torch.randn(100, device=DEVICE, requires_grad=True)
    y = torch.empty_like(x)
    norm_kernel.normalize(x, weight, y, 1e-5)
    torch.testing.assert_close(y, stages.kernels.REFERENCE.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
    assert y.grad_fn is None  # which is the stage's defect


# The comparison


@pytest.fixture
def results(tmp_path, train) -> Path:
    """Records as run_all_stages.sh leaves them, all of the same run: Version 1, stage 5, and stage 2 with its fix."""
    record = train("stage5") | {
        "step_ms": {"all": [10.0] * 3, "profiled": 0, "median": 10.0, "p20": 9.0, "p80": 11.0, "count": 3}
    }
    folder = tmp_path / "results"
    folder.mkdir()
    write_json(
        folder / "stage0_metrics.json", {key: value for key, value in record.items() if key != "stage"} | {"version": "v1"}
    )
    for name in ("stage5", "stage2", "stage2_fixed"):
        written = record | {"version": NAMES[name[:6]], "stage": record["stage"] | {"fixed": name.endswith("fixed")}}
        write_json(folder / f"{name}_metrics.json", written)
    return folder


def change(path: Path, **sections: dict) -> None:
    record = read_json(path)
    write_json(path, record | {name: record.get(name, {}) | values for name, values in sections.items()})


def verdict(folder: Path, name: str = "2 slow performance") -> str:
    """The last cell of a stage's row."""
    found = compare_stages.read(folder)
    rows = [compare_stages.row(stage, found[0], next(s for s in found if s.number == 5)) for stage in found]
    return next(row[-1] for row in rows if row[0] == name)


def slow(median: float) -> dict[str, float]:
    return {"median": median, "p20": 0.9 * median, "p80": 1.1 * median}


def test_a_stage_of_ones_own_is_compared_too(results):
    shutil.copy(results / "stage2_metrics.json", results / "stage10_metrics.json")
    assert [stage.number for stage in compare_stages.read(results)] == [0, 2, 2, 5, 10]


def test_nothing_is_found_where_nothing_is_wrong(results):
    for name in ("2 slow performance", "2 slow performance, fixed", "5 optimized"):
        assert verdict(results, name) == "nothing found"
    assert verdict(results, "Version 1") == ""


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"loss": {"all": [200.0, 9.0, 6.0]}}, "the loss starts at 200.0, a uniform guess costs 6.9"),
        ({"loss": {"all": [6.9, 6.9, 8.0]}}, "it learns less: the loss ends at 7.27, Version 1's at"),
        ({"stage": {"updated": 1}}, "13 of 14 parameters never get a gradient"),
        ({"step_ms": slow(40.0)}, "4.0 times stage 5's step; of +30.0 ms: +23.0 aten::bmm, +7.0 aten::mm"),
        ({"step_ms": slow(5.0)}, "2.0 times as fast as stage 5: what does it leave out?"),
        ({"step_ms": slow(11.5)}, "nothing found"),  # within the spread
        ({"phases_ms": {"forward": {"median": 4.0}}, "device": {"kind": "cuda"}},
         "the phases add up to 40% of the step: their clock does not wait for the device"),
        ({"phases_ms": {"forward": {"median": 4.0}}}, "nothing found"),  # a CPU's clock cannot be wrong in that way
    ],
    ids=("start", "learning", "gradient", "slower", "faster", "spread", "clock", "clock-cpu"),
)  # fmt: skip
def test_each_rule(results, changes, found):
    for name, shares in {"stage2": (0.6, 0.4), "stage5": (0.1, 0.9)}.items():
        rows = "".join(
            f"{operator},operator,1,1,1,,,{share}\n" for operator, share in zip(("aten::bmm", "aten::mm"), shares, strict=True)
        )
        (results / f"{name}_profile.csv").write_text("name,category,calls,total_ns,mean_ns,min_ns,max_ns,share\n" + rows)
    if "device" in changes:
        for path in results.glob("*.json"):
            change(path, device=changes["device"])
    change(results / "stage2_metrics.json", **changes)
    assert verdict(results).startswith(found)


def test_the_comparison_is_printed_and_written(results, run_script):
    change(results / "stage2_metrics.json", step_ms=slow(40.0), stage={"caveat": "less to see here"})
    done = run_script(FOLDER / "compare_stages.py", "--results-dir", results, "--output", "tables/comparison.md")
    written = (results.parent / "tables/comparison.md").read_text()
    for text in (done.stdout, written):
        assert "Version 1" in text and "4.0 times stage 5's step" in text and "Stage 2: less to see here." in text
    [row] = [line for line in written.splitlines() if line.startswith("| 2 slow performance |")]
    assert "| 50 | 0.25 | 14 of 14 |" in row  # 2 samples in 40 ms, where Version 1 takes 10


@pytest.mark.parametrize("missing", (0, 5))
def test_a_comparison_needs_version_1_and_stage_5(results, missing):
    (results / f"stage{missing}_metrics.json").unlink()
    with pytest.raises(UsageError, match=f"stage{missing}_metrics.json: make it with run_all_stages.sh --stages {missing}"):
        compare_stages.read(results)


def test_runs_that_were_not_made_alike_are_not_compared(results):
    change(results / "stage2_metrics.json", training={"batch_size": 64})
    with pytest.raises(UsageError, match=r"stage 2 slow performance differ in batch size \(2 and 64\)"):
        compare_stages.read(results)


def test_only_completed_runs_of_stages_are_compared(results):
    path = results / "stage2_metrics.json"
    record = read_json(path)
    write_json(path, record | {"status": "interrupted"})
    with pytest.raises(UsageError, match="stage2_metrics.json was not completed"):
        compare_stages.read(results)
    del record["stage"]
    write_json(path, record)
    with pytest.raises(UsageError, match="which is no stage"):
        compare_stages.read(results)


# run_all_stages.sh

# Stands in for python: a GPU is there, records and profiles are not needed, and stage 6 is refused.
STAND_IN = """#!/bin/sh
echo python "$@" >>"$CALLS"
case "$*" in
    -c*) echo "${DEVICE_FOUND:-cuda}" ;;
    *v3_stage6*--skip-check* | *v3_stage6*--fixed*) ;;
    *v3_stage6*) exit "${STAGE6:-1}" ;;
    *v3_stage4*) exit "${STAGE4:-0}" ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path) -> Callable[..., tuple[subprocess.CompletedProcess, list[str]]]:
    """Runs run_all_stages.sh with stand-ins for python and, with rocprof=True, rocprofv3; gives the calls of the two."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    for tool in ("bash", "basename", "dirname", "mkdir", "rm", "sed"):
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "python").write_text(STAND_IN)
    (tools / "python").chmod(0o755)

    def run_all(*arguments: str, check: int = 0, rocprof: bool = False, **environment: str):
        if rocprof:
            (tools / "rocprofv3").write_text('#!/bin/sh\necho rocprofv3 "$@" >>"$CALLS"\n')
            (tools / "rocprofv3").chmod(0o755)
        calls.write_text("")
        done = subprocess.run(
            ["bash", str(RUN_ALL), *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={"PATH": str(tools), "CALLS": str(calls), **environment},
        )  # fmt: skip
        assert done.returncode == check, f"exit code {done.returncode}, not {check}\n{done.stdout}\n{done.stderr}"
        return done, [line for line in calls.read_text().splitlines() if not line.startswith("python -c")]

    return run_all


def test_every_stage_runs_with_and_without_its_fix(stand_in):
    _, calls = stand_in("--seed", "7", "--data", "synthetic")
    trained = [call for call in calls if "--metrics-out" in call]
    every = " --use-amp --num-steps 60 --time-phases --measure-peak --seed 7 --data synthetic "
    assert all("--num-kv-heads 2 --preset medium --num-layers 4 " in call and every in f"{call} " for call in trained)
    written = [call.split("--metrics-out ")[1].split()[0] for call in trained]
    fixes = {f"./results/stage{number}_fixed_metrics.json" for number in (1, 2, 3, 4, 6)}
    assert set(written) == fixes | {f"./results/stage{number}_metrics.json" for number in range(7)} and len(written) == 13
    assert {call for call in trained if call.endswith("--fixed")} == {call for call in trained if "_fixed_metrics" in call}
    assert [call.endswith("--skip-check --profile-dir ./results/stage6_profile") for call in trained[-3:]] == [False, True, False]
    assert calls[-1].endswith("compare_stages.py --results-dir ./results --output ./results/comparison.md")
    assert sum("stage_profile.py" in call for call in calls) == 7


def test_rocprofv3_takes_the_profile_where_there_is_one(stand_in):
    _, calls = stand_in("--stages", "5", "--results-dir", "here", rocprof=True)
    [measured, profiled] = [call for call in calls if "--metrics-out" in call]
    assert profiled.startswith(
        "rocprofv3 --kernel-trace --stats --truncate-kernels --output-format csv -d here/stage5_profile -- python"
    )
    assert profiled.endswith("--num-steps 5") and "--profile-dir" not in measured + profiled
    _, calls = stand_in("--stages", "5", rocprof=True, DEVICE_FOUND="cpu")
    assert not any("rocprofv3" in call for call in calls)


def test_a_cpu_gets_a_small_model(stand_in):
    for arguments, environment in (((), {"DEVICE_FOUND": "cpu"}), (("--device", "cpu"), {})):
        _, calls = stand_in("--stages", "1", *arguments, **environment)
        assert all(
            "--num-kv-heads 2" in call and "--seq-len 512" in call and "--preset" not in call
            for call in calls
            if "--metrics-out" in call
        )


def test_a_failing_stage_is_named_and_the_rest_runs(stand_in):
    done, calls = stand_in(check=3, STAGE4="3")
    assert "stage4 failed with exit code 3: see ./results/stage4_output.log" in done.stderr
    assert any("v3_stage5" in call for call in calls)
    done, _ = stand_in("--stages", "6", check=1, STAGE6="0")  # the harness must refuse stage 6
    assert "stage6 was not refused" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "1 x"), "there is no stage 'x': --stages takes numbers, 0 to 6"),
        (("--stages",), "--stages needs a value"),
    ],
    ids=("stage", "value"),
)
def test_bad_input(stand_in, arguments, message):
    done, calls = stand_in(*arguments, check=2)
    assert done.stderr == f"error: {message}\n" and not calls


@pytest.mark.parametrize("which", ("0 5", pytest.param("0 1 2 3 4 5 6", marks=pytest.mark.slow)), ids=("two", "all"))
def test_run_all_stages(tmp_path, which):
    environment = os.environ | {
        "PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(RUN_ALL), "--stages", which, *SMALL, "--num-steps", "6"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for stage in which.split():
        assert (tmp_path / f"results/stage{stage}_profile.csv").read_text().startswith("name,category,calls,")
        assert "completed, 6 of 6 steps" in (tmp_path / f"results/stage{stage}_output.log").read_text()
    rows = [
        line.split("|")[1].strip() for line in (tmp_path / "results/comparison.md").read_text().splitlines() if line[:1] == "|"
    ]
    assert rows[2] == "Version 1" and "5 optimized" in rows
    if "6" in which:
        assert len(rows) == 2 + 12
        assert "error: this model does not train" in (tmp_path / "results/stage6_output.log").read_text()
        assert "13 of 14 parameters never get a gradient" in done.stdout and "the loss starts at" in done.stdout


def test_the_stages_measured_on_an_h100_show_their_symptoms():
    found = compare_stages.read(ROOT / "results/h100/stages")
    v1, v3 = found[0], next(stage for stage in found if stage.number == compare_stages.V3)
    said = {(stage.number, stage.fixed): compare_stages.findings(stage, v1, v3) for stage in found[1:]}
    symptoms = {
        1: "the loss starts at", 2: "times stage 5's step", 3: "their clock does not wait", 4: "times stage 5's step",
        6: "never get a gradient",
    }  # fmt: skip
    assert all(symptom in said[number, False][0] for number, symptom in symptoms.items())
    assert [said[number, True] for number in (1, 3, 4, 6)] == [[]] * 4 and said[5, False] == []


# On a GPU

WIDE = (
    *("--preset", "medium", "--num-layers", "4", "--hidden-dim", "2048", "--num-heads", "16", "--intermediate-dim", "5632"),
    *("--batch-size", "32", "--num-kv-heads", "2", "--use-amp", "--data", "synthetic"),
    *("--num-steps", "10", "--warmup-steps", "2", "--time-phases"),
)


def share(record: dict) -> float:
    """Of the step that its phases add up to."""
    return sum(phase["median"] for phase in record["phases_ms"].values()) / record["step_ms"]["median"]


@pytest.mark.gpu
def test_on_a_gpu_every_symptom_shows_and_the_fix_removes_it(train):
    real = train("stage5", *WIDE, gpu=True)
    step = real["step_ms"]["median"]
    slow_stages = {name: [train(name, *WIDE, *flags, gpu=True) for flags in ((), ("--fixed",))] for name in ("stage2", "stage4")}
    for name, (broken, fixed) in slow_stages.items():
        assert broken["step_ms"]["median"] > 1.1 * fixed["step_ms"]["median"], name
        assert broken["loss"]["all"] == pytest.approx(real["loss"]["all"], abs=0.1)
    assert share(train("stage3", *WIDE, gpu=True)) < compare_stages.CLOCK
    assert share(train("stage3", *WIDE, "--fixed", gpu=True)) > 0.9
    assert share(real) > 0.9
    wrong = train("stage6", *WIDE, "--skip-check", gpu=True)
    assert wrong["stage"]["updated"] == 1 and wrong["step_ms"]["median"] < 0.8 * step
    assert wrong["memory"]["peak_mib"] < real["memory"]["peak_mib"]
    with pytest.raises(RunError, match="does not train"):
        train("stage6", *WIDE, gpu=True)
