"""The benchmark: its cells are planned and measured in turn, failures are results, and what one
process does.
"""

import signal
from types import SimpleNamespace

from studies import accuracy, benchmark, job_runner
from studies.peers import external_baselines, known_models
from tests import study_options
from tests.conftest import ROOT
from tests.records import record
from tracepage.errors import UsageError
from tracepage.files import read_json, schema_of
from tracepage.readers import chrome_trace
from tracepage.records.study_files import Benchmark
from tracepage.views import benchmark_suite

import pytest
import torch

SCRIPT = ROOT / "version2_pytorch_fused" / "benchmark_suite.py"
KNOWN = known_models.find(ROOT)


def test_shapes_are_resolved_smallest_first(config):
    models, shapes = benchmark.plan(study_options.benchmark(config, seq_lengths=[300, 8]), KNOWN)
    assert [model.name for model in models] == ["v1", "v2"]
    assert [(shape.batch_size, shape.seq_len) for shape in shapes] == [
        (2, 8),
        (4, 8),
        (2, 300),
        (4, 300),
    ]
    assert shapes[0].model.hidden_size == 32 and shapes[-1].model.max_sequence_length == 300


RUN = {
    "step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2},
    "peak_mib": 5.0,
    "kind": "GPU allocator",
}


def measured_with(outcome, config, path, found=RUN, **changes) -> tuple[int, list, dict]:
    """What `measure` makes of processes that answer outcome(model, batch_size), by default "ok" and
    what was found.
    """
    calls = []

    def answer(work, device, timeout):
        model, shape = work.args[0], work.args[1 if work.func is benchmark.speed else 2]
        calls.append((model.name, shape.batch_size if work.func is benchmark.speed else "accuracy"))
        machine = {key: record()[key] for key in ("device", "environment")}
        return (
            machine
            | {"status": "ok", "reason": None, "found": found}
            | outcome(model.name, shape.batch_size)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_runner, "in_a_process", answer)
        arguments = study_options.benchmark(config, **changes)
        code = benchmark.measure(arguments, *benchmark.plan(arguments, KNOWN), KNOWN["v1"], path)
    return code, calls, read_json(path, schema_of(Benchmark))


def test_models_are_measured_in_turn(config, tmp_path):
    code, calls, measured = measured_with(lambda *_: {}, config, tmp_path / "b.json")
    assert code == 0 and calls == [
        ("v1", 2),
        ("v2", 2),
        ("v1", 2),
        ("v2", 2),
        ("v1", 4),
        ("v2", 4),
        ("v1", 4),
        ("v2", 4),
    ]
    assert measured["status"] == "completed" and measured["device"] == record()["device"]
    assert measured["deterministic"] is False
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2] * 4 and measured[
        "accuracy"
    ] == []


def test_accuracy_is_taken_at_the_smallest_shape_alone(config, tmp_path):
    found = {"gradient_error": 0.1}
    _, calls, measured = measured_with(
        lambda *_: {}, config, tmp_path / "b.json", found, metrics=["accuracy"]
    )
    assert calls == [("v1", "accuracy"), ("v2", "accuracy")] and measured["cells"] == []
    assert {(entry["batch_size"], entry["sequence_length"]) for entry in measured["accuracy"]} == {
        (2, 8)
    }


def test_errors_are_the_largest_of_all_seeds_and_of_all_gradients(config, monkeypatch):
    gradients = {0: (0.5, 0.2), 1: (0.1, 0.3)}

    def of_seed(baseline, version, options, flags):
        first, second = gradients[options.seed]
        return {
            "logits": first / 10,
            "loss": 9.0,
            "gradient of first": first,
            "gradient of second": second,
            accuracy.TOGETHER: second / 2,
        }

    monkeypatch.setattr(accuracy, "errors_against_float64", of_seed)
    options = study_options.resolved(config)
    found = benchmark.errors(KNOWN["v2"], KNOWN["v1"], options, repeats=2)
    assert found == {
        "logits_error": 0.05,
        "gradient_error": 0.5,
        "gradient": "first",
        "gradients_together": [0.1, 0.15],
    }


@pytest.mark.parametrize("status, code", [("out of memory", 0), ("timed out", 1), ("failed", 1)])
def test_a_failed_cell_is_not_repeated_and_the_rest_goes_on(status, code, config, tmp_path):
    def outcome(model, batch_size):
        return {"status": status, "reason": "why"} if (model, batch_size) == ("v2", 2) else {}

    got, calls, measured = measured_with(outcome, config, tmp_path / "b.json")
    assert got == code and calls.count(("v2", 2)) == 1 and calls.count(("v2", 4)) == 2
    cell = measured["cells"][1]
    assert (cell["status"], cell["reason"]) == (status, "why")
    assert (
        f"- v2, B 2, S 8: {status}: why"
        in benchmark_suite.render_benchmark(tmp_path / "b.json").markdown()
    )


def test_a_signal_keeps_what_was_measured_and_starts_no_other_process(config, tmp_path):
    """The second process receives it and fails."""

    def outcome(model, batch_size):
        if (model, batch_size) != ("v2", 2):
            return {}
        signal.raise_signal(signal.SIGTERM)
        return {"status": "failed", "reason": "stopped"}

    code, calls, measured = measured_with(outcome, config, tmp_path / "b.json")
    assert (
        code == 128 + signal.SIGTERM
        and calls == [("v1", 2), ("v2", 2)]
        and measured["status"] == "interrupted"
    )
    assert [cell["status"] for cell in measured["cells"]] == ["ok", "not run", "not run", "not run"]


@pytest.mark.parametrize(
    "name, asked, expected",
    [
        ("v1", False, False),
        ("v1", True, True),
        ("v1-deterministic", False, True),
        ("hf", False, False),
        ("hf", True, True),
    ],
)
def test_all_models_of_a_study_run_in_its_mode(name, asked, expected, config):
    if name == "hf":
        pytest.importorskip("transformers", reason="needs transformers")
    arguments = study_options.benchmark(config, models=[name], deterministic=asked)
    models, shapes = benchmark.plan(arguments, KNOWN)
    benchmark.built(models[0], shapes[0])
    assert torch.are_deterministic_algorithms_enabled() == expected


def test_energy_needs_a_counter(config):
    with pytest.raises(UsageError, match="--metrics energy: only an NVIDIA GPU counts its energy"):
        benchmark.plan(study_options.benchmark(config, metrics=["energy"]), KNOWN)


def test_energy_is_that_of_the_timed_steps(config, monkeypatch):
    """With a counter that each step raises by two joules. Steps of load come before, and a trace
    after.
    """
    steps = []
    durations = []
    step = SimpleNamespace(step=lambda batch: steps.append(0), model=None, graph_peak_bytes=0)

    def timed(function, device, warmup, iterations, seconds):
        durations.append(seconds)
        return [function() or 1.5 for _ in range(iterations)]

    monkeypatch.setattr(benchmark, "built", lambda model, options: (step, None))
    monkeypatch.setattr(benchmark, "benchmark", timed)
    monkeypatch.setattr(benchmark.nvml, "joules", lambda: 7.0 + 2 * len(steps))
    arguments = study_options.benchmark(config, load_seconds=3.0, timed_seconds=5.0)
    arguments.metrics = ["throughput", "energy"]
    timing = benchmark.timing_of(arguments)
    run = benchmark.speed(KNOWN["v1"], study_options.resolved(config), timing)
    assert run["joules"] == 2 and run["step_ms"]["count"] == arguments.num_steps
    assert durations == [3, benchmark.ENERGY_SECONDS]
    arguments.metrics = ["throughput"]
    assert benchmark.timing_of(arguments)[:4] == (arguments.num_steps, 3, 5, False)
    # On a CPU:
    assert run["host_us"] is run["watts"] is run["clock_mhz"] is run["celsius"] is None


def test_peak_memory_is_that_of_the_timed_steps(config, monkeypatch):
    events = []
    step = SimpleNamespace(step=lambda batch: events.append("step"), model=None, graph_peak_bytes=0)
    monkeypatch.setattr(benchmark, "built", lambda model, options: (step, None))
    reset = benchmark.devices.reset_peak_memory
    monkeypatch.setattr(
        benchmark.devices,
        "reset_peak_memory",
        lambda device: events.append("reset") or reset(device),
    )
    benchmark.speed(KNOWN["v1"], study_options.resolved(config), benchmark.Timing(steps=3))
    assert events == ["step"] * benchmark.WARMUP + ["reset"] + ["step"] * 3


def test_a_trace_is_named_by_its_model_and_preset(config, tmp_path):
    options = study_options.resolved(config)
    path = benchmark.trace_path(tmp_path, KNOWN["v2-compile"], options)
    assert path == tmp_path / "v2_compile_tiny.json.gz"
    path = benchmark.trace_path(tmp_path, KNOWN["hf"], options)
    assert path == tmp_path / "peer_hf_tiny.json.gz"


def test_a_trace_of_two_steps_is_kept(config, tmp_path):
    timing = benchmark.Timing(1, trace_dir=tmp_path)
    benchmark.speed(KNOWN["v1"], study_options.resolved(config), timing)
    assert len(chrome_trace.load(tmp_path / "v1_tiny.json.gz").steps) == 2


def test_a_whole_benchmark(execute, config, monkeypatch, tmp_path):
    """Its errors against float64 are computed in this process, which is quicker than a new one."""

    def run(work, device, timeout):
        if work.func is benchmark.speed:
            return in_a_process(work, device, timeout)
        return {"status": "ok", "reason": None, "found": work()}

    in_a_process = job_runner.in_a_process
    monkeypatch.setattr(job_runner, "in_a_process", run)
    names = ["v1", "hf" if external_baselines.importlib.util.find_spec("transformers") else "v2"]
    printed = execute(
        SCRIPT,
        "--models",
        ",".join(names),
        "--batch-sizes",
        "2",
        "--seq-lengths",
        "9",
        "--config",
        config,
        "--num-steps",
        "2",
        "--repeats",
        "1",
        "--metrics",
        "throughput,memory,accuracy",
        "--device",
        "cpu",
    )
    assert f"{2 * len(names):4d} of {2 * len(names)}" in printed.out
    assert "process RSS" in printed.out
    folder = tmp_path / "benchmark_suite"
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv", ".json", ".md"]
    measured = read_json(folder / "benchmark.json", schema_of(Benchmark))
    assert (
        measured["device"]["kind"] == "cpu"
        and measured["models"] == names
        and measured["precision"] == {"compute": "fp32"}
    )
    assert measured["packages"].keys() == ({"transformers"} if "hf" in names else set())
    for cell in measured["cells"]:
        assert (
            cell["status"] == "ok"
            and cell["runs"][0]["step_ms"]["count"] == 2
            and cell["runs"][0]["peak_mib"] > 50
        )
    assert len(measured["accuracy"]) == len(names)
    for entry in measured["accuracy"]:
        assert 0 < entry["gradient_error"] < 1e-4 and 0 < entry["logits_error"] < 1e-5
        (together,) = entry["gradients_together"]
        assert 0 < together < 1e-5
