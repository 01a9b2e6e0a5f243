"""The profiler of a run: the steps that it watches, the files that it writes, and a run that is
stopped before its end.
"""

import errno
import json
import os
import signal

from common.config import ModelConfig
from common.training import profile_files, profiler
from common.training.run import Run
from tests.conftest import TINY, V1, run_options
from tracepage.cost import flops
from tracepage.errors import RunError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = V1 / "tiny_llama_v1.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "4")
pytestmark = pytest.mark.usefixtures("known_ceilings")


@pytest.mark.parametrize(
    ("steps", "asked", "active", "slow"),
    [(20, 3, 3, 4), (20, 1, 1, 2), (20, 5, 5, 6), (6, 3, 2, 3), (2, 3, 1, 2)],
)
def test_the_steps_of_a_profile(tmp_path, steps, asked, active, slow):
    """The last ones, as many as asked for but less than half of the run; the profiler also slows
    the one before them.
    """
    flags = [
        "--num-steps",
        str(steps),
        "--profile-steps",
        str(asked),
        "--profile-dir",
        str(tmp_path),
    ]
    watched = profiler.Profiler(run_options(tiny_llama_v1, *flags), torch.device("cpu"))
    assert (watched.active, watched.slow_steps(steps)) == (active, slow)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_short_run_shortens_the_profile_and_still_writes_a_trace(execute, tmp_path, steps):
    execute(
        SCRIPT,
        *QUICK,
        "--num-steps",
        steps,
        "--enable-pytorch-profiler",
        "--profile-dir",
        "profiles",
    )
    (profile,) = (tmp_path / "profiles").glob("profile_*.json")
    content = json.loads(profile.read_text())
    assert content["profiled_steps"] == len(content["step_us"]) >= 1
    assert (tmp_path / "profiles" / content["trace"]).exists()
    assert {"attention", "mlp", "norm", "loss", "embed", "optimizer"} <= {
        row["span"] for row in content["operators"]
    }


def test_a_folder_whose_name_json_would_escape_gets_its_profile(execute, tmp_path):
    name = 'a "quoted" \\ folder'
    execute(SCRIPT, *QUICK, "--enable-pytorch-profiler", "--profile-dir", name)
    assert {path.name[:5] for path in (tmp_path / name).iterdir()} >= {"trace", "profi", "run.h"}


def test_memory_and_operators_are_shown_and_tensorboard_serves_them(execute, tmp_path):
    flags = (
        "--profile-memory",
        "--profile-operators",
        "--sort-by",
        "cpu_memory_usage",
        "--metrics-out",
        "metrics.json",
    )
    printed = execute(SCRIPT, *QUICK, *flags)
    page = (tmp_path / "pytorch_profiles/run.html").read_text()
    for namespace in ("http://www.w3.org", "http://purl.org", "http://creativecommons.org"):
        page = page.replace(namespace, "")
    assert "<svg" in page and "http://" not in page, "the page needs nothing from elsewhere"
    assert (
        'id="memory"' in page
        and "run.html#memory" in (tmp_path / "pytorch_profiles/memory_timeline.html").read_text()
    )
    assert printed.out.splitlines()[-1] == "  page         pytorch_profiles/run.html"
    assert "MiB allocated" in printed.out and "count as 0" not in " ".join(printed.out.split())
    (path,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    assert "operator_flops" not in json.loads(path.read_text()), "which nobody has asked for"
    assert "python_function" not in next(path.parent.glob("trace_*.json")).read_text()

    (folder,) = (path for path in (tmp_path / "pytorch_profiles").iterdir() if path.is_dir())
    assert folder.name == f"run_v1_tiny_fp32_2x16_{path.stem.removeprefix('profile_')}", (
        "TensorBoard's name of the run"
    )
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx(
        json.loads((tmp_path / "metrics.json").read_text())["loss"]["all"], rel=1e-6
    )
    assert {"train/step_ms", "train/tokens_per_second"} <= set(events.Tags()["scalars"])


def test_stacks_and_flops_are_added_where_asked(execute, tmp_path):
    """The profiler counts what Version 1's products execute, and Python's calls are in the trace
    but are no operators.
    """
    printed = execute(
        SCRIPT, *QUICK, "--profile-with-stack", "--profile-with-flops", "--profile-operators"
    )
    (path,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    profile = json.loads(path.read_text())
    counted, run = profile["operator_flops"], profile["run"]
    sizes = (
        ModelConfig(**run["model"]),
        run["training"]["batch_size"],
        run["training"]["sequence_length"],
    )
    executed = flops.training_step(*sizes, causal=False)["total"]
    assert (counted["aten::mm"] + counted["aten::bmm"]) / profile["profiled_steps"] == executed
    trace = json.loads((path.parent / profile["trace"]).read_text())["traceEvents"]
    names = {event["name"] for event in trace if event.get("cat") == "python_function"}
    assert any("tiny_llama_v1.py" in name for name in names)
    assert not names & {row["name"] for row in profile["operators"]}
    assert "GFLOP" in printed.out and "count as 0" in " ".join(printed.out.split())


def test_attention_only_keeps_nothing_else(execute, tmp_path):
    execute(SCRIPT, *QUICK, "--profile-attention-only", "--enable-pytorch-profiler")
    (profile,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    content = json.loads(profile.read_text())
    assert content["attention_only"] and {row["span"] for row in content["operators"]} == {
        "attention"
    }
    assert {row["phase"] for row in content["operators"]} == {"forward", "backward"}


def stopped(at_step, step: int, *flags: str) -> Run:
    """Of a run of eight steps, the last three of them profiled, that gets SIGTERM in a step."""
    at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    own = [
        "--device",
        "cpu",
        "--num-steps",
        "8",
        "--profile-steps",
        "3",
        "--profile-dir",
        "profiles",
        *flags,
    ]
    result = tiny_llama_v1.train(run_options(tiny_llama_v1, *QUICK, *own))
    assert result.exit_code == 128 + signal.SIGTERM and len(result.record["step_ms"]["all"]) == step
    return result


def test_a_run_that_is_stopped_while_it_is_profiled_keeps_whole_steps_only(
    at_step, monkeypatch, tmp_path
):
    """In the profiler's warm-up: no profile. In the second of three profiled steps: two, with as
    many products each.
    """
    monkeypatch.chdir(tmp_path)
    assert stopped(at_step, 5, "--profile-memory").profiles == [] and not list(
        (tmp_path / "profiles").iterdir()
    )
    result = stopped(at_step, 7, "--enable-pytorch-profiler")
    profile = json.loads(result.profiles[0].read_text())
    products = sum(row["calls"] for row in profile["operators"] if row["name"] == "aten::mm")
    assert profile["profiled_steps"] == 2 and products == 2 * 3 * (
        7 * result.record["model"]["num_layers"] + 1
    )


def test_a_trace_that_is_cut_off_leaves_nothing_behind(tmp_path):
    class FullDisk:
        def export_chrome_trace(self, path: str) -> None:
            assert os.stat(path.rpartition("/")[0]).st_dev == tmp_path.stat().st_dev
            with open(f"{path}.tmp", "w") as file:
                file.write('{"traceEvents": [')

    with pytest.raises(RunError, match=f"could not be written into {tmp_path}: is the disk full"):
        profiler.exported(FullDisk(), tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def full(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# lines of the profiler's own library, in some builds or after another profile
KINETOS = ("USDT:", "ERROR:")


def test_a_profile_that_cannot_be_written_fails_the_run(execute, monkeypatch, tmp_path):
    monkeypatch.setattr(profile_files, "write_json", full)
    printed = execute(SCRIPT, *QUICK, "--profile-dir", "profiles", "--validate-setup", check=1)
    own = [line for line in printed.err.splitlines() if not line.startswith(KINETOS)]
    assert own == [
        "error: the profile could not be written into profiles: [Errno 28] No space left on device"
    ]
    assert "setup ok" not in printed.out
    assert not [
        path
        for path in (tmp_path / "profiles").iterdir()
        if path.is_dir() or path.suffix != ".json"
    ]


def test_the_record_is_there_before_the_trace_is_written(at_step, monkeypatch, tmp_path):
    """A second Ctrl-C, which many send while a large trace is exported, loses the trace and no
    step.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiler.Profiler, "export", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        stopped(at_step, 7, "--enable-pytorch-profiler")
    record = json.loads((tmp_path / "metrics_v1.json").read_text())
    assert record["status"] == "interrupted" and len(record["step_ms"]["all"]) == 7
