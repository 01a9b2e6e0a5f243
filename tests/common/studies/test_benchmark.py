"""The benchmark: cells are measured in turn, failures are results, ratios follow."""

import csv
import io
import json
import os
import pickle
import signal
import sys
import threading
from argparse import Namespace
from functools import partial
from pathlib import Path

from common import files
from common.config import ModelConfig
from common.errors import RunError, UsageError
from common.files import read_json, write_json
from common.precision import Precision
from common.studies import accuracy, benchmark, external_baselines
from common.training.step import Prepared
from tests.conftest import ROOT, altered_version
from tests.records import record

import pytest
import torch

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "benchmark_suite.py"
KNOWN = benchmark.known_models(ROOT)
SMALL = """
model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48, vocab_size: 50}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


# ----------------------------------------------------------------------------------------------------------- one process


def test_the_steps_of_a_process_and_the_loss_after_them(monkeypatch):
    losses = []

    def step(batch):
        losses.append(float(len(losses)))
        return torch.tensor(losses[-1])

    prepared = Prepared(torch.nn.Linear(1, 1), None, step)
    monkeypatch.setattr(benchmark, "built", lambda *_: (prepared, Precision(torch.device("cpu"), None)))
    errors = {"logits": 0.1, "gradient of a": 1.0, "gradient of b": 2.0}
    monkeypatch.setattr(accuracy, "errors_against_float64", lambda *_: errors)
    model = Namespace(load=lambda: None, flags=())
    settings = Namespace(model=ModelConfig(), batch_size=1, seq_len=4, seed=0, accuracy_steps=3, num_steps=5)
    found = benchmark.errors(model, model, settings)
    assert found["loss"] == 3 and (found["logits_error"], found["gradient"], found["gradient_error"]) == (0.1, "b", 2.0)
    losses.clear()
    assert benchmark.speed(model, settings)["step_ms"]["count"] == 5
    assert len(losses) == benchmark.WARMUP + 1 + 5


# --------------------------------------------------------------------------------------------------------------- plans


def options(config: Path, **changes) -> Namespace:
    chosen = dict(
        models=["v1", "v2"], metrics=["throughput", "memory"], batch_sizes=[4, 2], seq_lengths=[8], num_steps=2, repeats=2,
        gpus=1, accuracy_steps=2, timeout=100, preset="tiny", config=config, seed=0, device="cpu", use_amp=False, amp_dtype=None,
    )  # fmt: skip
    return Namespace(**chosen | changes)


def test_versions_are_found_as_they_come(tmp_path):
    for name in ("version1_a/tiny_llama_v1.py", "version3_b/tiny_llama_v3.py", "version3_b/tiny_llama_v3_config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("TinyLlama = make_model = make_optimizer = make_step = None")
    names = ["v1", "v3", *external_baselines.PEERS]  # no v2, and no version has torch.compile
    captured = [f"{name}-captured" for name in names if not name.startswith("captured")]
    assert list(benchmark.known_models(tmp_path)) == [*names, *captured]
    compiled, captured = KNOWN["v2-compile"], KNOWN["v2-compile-captured"]
    assert compiled.flags == captured.flags == ("--enable-torch-compile",) and (compiled.captured, captured.captured) == (
        False,
        True,
    )
    assert compiled.load().__file__ == captured.load().__file__ == str(V2 / "tiny_llama_v2.py")
    assert KNOWN["hf-captured"].load() is external_baselines.PEERS["hf"] and "v1-compile" not in KNOWN


@pytest.mark.parametrize(
    "name, message", [("v1-captured", "--capture-step needs a GPU"), ("captured", "captured needs an NVIDIA or AMD GPU")]
)
def test_a_captured_model_needs_a_gpu(name, message, config):
    with pytest.raises(UsageError, match=message):
        benchmark.plan(options(config, models=[name]), KNOWN)


@pytest.mark.parametrize("name, deterministic", [("v1", True), ("hf", False)])
def test_only_versions_run_with_deterministic_algorithms(name, deterministic, config):
    if name == "hf":
        pytest.importorskip("transformers")
    models, shapes = benchmark.plan(options(config, models=[name]), KNOWN)
    benchmark.built(models[0], shapes[0])
    assert torch.are_deterministic_algorithms_enabled() == deterministic


def test_shapes_are_resolved_smallest_first(config):
    models, shapes = benchmark.plan(options(config, seq_lengths=[300, 8]), KNOWN)
    assert [model.name for model in models] == ["v1", "v2"]
    assert [(shape.batch_size, shape.seq_len) for shape in shapes] == [(2, 8), (4, 8), (2, 300), (4, 300)]
    assert shapes[0].model.hidden_size == 32 and shapes[-1].model.max_sequence_length == 300


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--models", "v1,v9"], "--models: there is no 'v9'; there are v1, v2, "),
        (["--models", "v1,v1"], "--models: v1 is given twice"),
        (["--models", ""], "--models: there is no ''"),
        (["--metrics", "speed"], "--metrics: there is no 'speed'; there are throughput, memory, accuracy"),
        (["--batch-sizes", "4,x"], "'x' is not a positive whole number"),
        (["--batch-sizes", "4,4"], "--batch-sizes: 4 is given twice"),
        (["--seq-lengths", "0"], "'0' is not a positive whole number"),
        (["--batch-size", "4"], "unrecognized arguments: --batch-size"),
        (["--config", "none.yaml"], "cannot read config none.yaml"),
        (["--repeats", "0"], "'0' is not a positive whole number"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_nothing_is_written(refused, flags, message, tmp_path):
    assert message in refused(SCRIPT, "--device", "cpu", *flags)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused(refused, tmp_path):
    (tmp_path / "taken").write_text("a file")
    said = refused(SCRIPT, "--output-dir", tmp_path / "taken" / "out")
    assert said.startswith("error: --output-dir: cannot write in")


# ----------------------------------------------------------------------------------------------------------- measuring


RUN = {"step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2}, "peak_mib": 5.0, "kind": "GPU allocator"}


def measured_with(outcome, config, path, found=RUN, **changes) -> tuple[int, list, dict]:
    """What `measure` makes of processes that answer outcome(model, batch_size), by default "ok" and what was found."""
    calls = []

    def answer(work, options, gpu):
        model, shape = work.args[0], work.args[-1]
        calls.append((model.name, shape.batch_size if work.func is benchmark.speed else "accuracy"))
        machine = {key: record()[key] for key in ("device", "environment")}
        return machine | {"status": "ok", "reason": None, "found": found} | outcome(model.name, shape.batch_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "run_process", answer)
        models, shapes = benchmark.plan(options(config, **changes), KNOWN)
        code = benchmark.measure(models, shapes, KNOWN["v1"], path)
    return code, calls, read_json(path, benchmark.SCHEMA)


def test_models_are_measured_in_turn(config, tmp_path):
    code, calls, measured = measured_with(lambda *_: {}, config, tmp_path / "b.json")
    assert code == 0 and calls == [("v1", 2), ("v2", 2), ("v1", 2), ("v2", 2), ("v1", 4), ("v2", 4), ("v1", 4), ("v2", 4)]
    assert measured["status"] == "completed" and measured["device"] == record()["device"]
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2] * 4 and measured["accuracy"] == []


def test_several_gpus_share_the_processes(config, tmp_path, monkeypatch):
    """Each process has a GPU of its own, both GPUs are used, and a cell that failed keeps that."""
    both, used = threading.Barrier(2, timeout=30), []

    def answer(work, options, gpu):
        used.append(gpu)
        both.wait()  # passes only while a second process runs
        failed = work.args[0].name == "v2"
        return {"status": "failed", "reason": "why"} if failed else {"status": "ok", "reason": None, "found": RUN}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(benchmark, "run_process", answer)
    models, shapes = benchmark.plan(options(config, gpus=2, repeats=1), KNOWN)
    assert benchmark.measure(models, shapes, KNOWN["v1"], tmp_path / "b.json") == 1
    cells = read_json(tmp_path / "b.json", benchmark.SCHEMA)["cells"]
    assert set(used) == {"3", "5"} and [(cell["status"], len(cell["runs"])) for cell in cells] == [("ok", 1), ("failed", 0)] * 2


def test_more_gpus_than_there_are_is_refused(refused, tmp_path):
    said = refused(SCRIPT, "--gpus", 99, "--output-dir", tmp_path)
    assert said.strip() == f"error: --gpus 99: there are {torch.cuda.device_count()} GPUs"


def test_accuracy_is_taken_at_the_smallest_shape_alone(config, tmp_path):
    found = {"loss": 1.0, "gradient_error": 0.1}
    _, calls, measured = measured_with(lambda *_: {}, config, tmp_path / "b.json", found, metrics=["accuracy"])
    assert calls == [("v1", "accuracy"), ("v2", "accuracy")] and measured["cells"] == []
    assert {(entry["batch_size"], entry["sequence_length"]) for entry in measured["accuracy"]} == {(2, 8)}


@pytest.mark.parametrize("status, code", [("out of memory", 0), ("timed out", 1), ("failed", 1)])
def test_a_failed_cell_is_not_repeated_and_the_rest_goes_on(status, code, config, tmp_path):
    def outcome(model, batch_size):
        return {"status": status, "reason": "why"} if (model, batch_size) == ("v2", 2) else {}

    got, calls, measured = measured_with(outcome, config, tmp_path / "b.json")
    assert got == code and calls.count(("v2", 2)) == 1 and calls.count(("v2", 4)) == 2
    cell = measured["cells"][1]
    assert (cell["status"], cell["reason"]) == (status, "why")
    assert f"- v2, B 2, S 8: {status}: why" in benchmark.analyze(tmp_path / "b.json").markdown()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_keeps_what_was_measured(number, config, tmp_path, capsys):
    def outcome(model, batch_size):
        if (model, batch_size) == ("v2", 4):
            os.kill(os.getpid(), number)
            return {"status": "failed", "reason": "KeyboardInterrupt"}
        return {}

    code, calls, measured = measured_with(outcome, config, tmp_path / "benchmark.json")
    assert code == 128 + number and calls[-1] == ("v2", 4) and measured["status"] == "interrupted"
    assert [cell["status"] for cell in measured["cells"]] == ["ok", "ok", "ok", "not run"]
    assert len(measured["cells"][2]["runs"]) == 1  # of two repeats
    text = benchmark.analyze(tmp_path / "benchmark.json").markdown()
    assert "- v2, B 4, S 8: not run" in text and "The run was interrupted" in text


def failing(folder: Path, code: str) -> benchmark.Model:
    """Version 1 whose training step runs this code first."""
    return benchmark.Model("broken", altered_version(folder, code))


@pytest.mark.parametrize(
    "code, status, reason",
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "out of memory", "OutOfMemoryError: CUDA out of memory"),
        ("raise ValueError('two\\n lines')", "failed", "ValueError: two lines"),
    ],
    ids=["memory", "error"],
)
def test_an_exception_in_a_process_is_a_status(code, status, reason, config, tmp_path, monkeypatch):
    _, shapes = benchmark.plan(options(config), KNOWN)
    work, result = partial(benchmark.speed, failing(tmp_path, code), shapes[0]), tmp_path / "result.json"
    monkeypatch.setattr(sys, "stdin", Namespace(buffer=io.BytesIO(pickle.dumps((work, "cpu", result)))))
    benchmark.main()
    outcome = read_json(result)
    assert (outcome["status"], outcome["reason"]) == (status, reason) and outcome["device"]["kind"] == "cpu"


@pytest.mark.parametrize(
    "code, status, reason",
    [
        ("os.kill(os.getpid(), 9)", "out of memory", "killed by the system (SIGKILL)"),
        ("print('\\nlast words', flush=True); os._exit(3)", "failed", "last words"),
    ],
    ids=["killed", "exit"],
)
def test_the_end_of_a_process_is_a_status(code, status, reason, config, tmp_path):
    model = failing(tmp_path, code)
    _, shapes = benchmark.plan(options(config), KNOWN)
    outcome = benchmark.run_process(partial(benchmark.speed, model, shapes[0]), shapes[0])
    assert outcome["status"] == status and outcome["reason"].startswith(reason)


def test_a_process_that_takes_too_long_is_ended(config):
    models, shapes = benchmark.plan(options(config, timeout=0.2), KNOWN)
    outcome = benchmark.run_process(partial(benchmark.speed, models[0], shapes[0]), shapes[0])
    assert outcome == {"status": "timed out", "reason": "not done after 0.2 s"}


def test_a_whole_benchmark(execute, config, tmp_path):
    names = ["v1", "hf" if external_baselines.importlib.util.find_spec("transformers") else "v2"]
    printed = execute(
        SCRIPT, "--models", ",".join(names), "--batch-sizes", "2", "--seq-lengths", "9", "--config", config, "--num-steps", "2",
        "--repeats", "1", "--accuracy-steps", "3", "--metrics", "throughput,memory,accuracy",
    )  # fmt: skip
    assert f"{2 * len(names):4d} of {2 * len(names)}" in printed.out
    assert "Peak resident memory of the whole process" in printed.out
    folder = tmp_path / "benchmark_suite"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"benchmark.{kind}" for kind in ("csv", "html", "json", "md", "png")
    ]
    measured = files.read(folder / "benchmark.json", benchmark.Benchmark)
    assert measured["device"]["kind"] == "cpu" and measured["models"] == names and measured["precision"] == {"compute": "fp32"}
    assert measured["packages"].keys() == ({"transformers"} if "hf" in names else set())
    for cell in measured["cells"]:
        assert cell["status"] == "ok" and cell["runs"][0]["step_ms"]["count"] == 2 and cell["runs"][0]["peak_mib"] > 50
    losses = [entry["loss"] for entry in measured["accuracy"]]
    assert len(losses) == len(names) and max(losses) - min(losses) < 1e-4
    for entry in measured["accuracy"]:
        assert entry["floor"] < entry["loss"] < 6 and 0 < entry["gradient_error"] < 1e-4 and 0 < entry["logits_error"] < 1e-5


# ------------------------------------------------------------------------------------------------------------ analysis


def made_up(models=("v1", "v2"), metrics=benchmark.METRICS) -> dict:
    """v2 takes half the time of v1 (0.4 and 0.6 of it in the two repeats) and a quarter less memory; B 8, S 16 ran out of it."""
    cells = []
    for length in (8, 16):
        for size in (4, 8):
            for model in models:
                full = model == "v2" and (size, length) == (8, 16)
                ms = [1.0 * size * length, 1.0 * size * length]
                ms = [0.4 * ms[0], 0.6 * ms[1]] if model == "v2" else ms
                runs = [
                    {"step_ms": {"median": t, "p20": 0.9 * t, "p80": 1.1 * t, "count": 10}, "kind": "GPU allocator",
                     "peak_mib": length * (75.0 if model == "v2" else 100.0)}
                    for t in ms
                ]  # fmt: skip
                status = {"status": "out of memory", "reason": "CUDA", "runs": []} if full else {"status": "ok", "reason": None}
                where = {"model": model, "batch_size": size, "sequence_length": length}
                cells.append({"runs": runs} | where | status)
    found = {"loss": 2.0, "floor": 1.0, "logits_error": 1e-7, "gradient_error": 2e-6, "gradient": "norm.weight"}
    accuracy = [
        {"model": model, "batch_size": 4, "sequence_length": 8, "status": "ok", "reason": None}
        | found | {"loss": 2.0 + 0.001 * i} for i, model in enumerate(models)
    ]  # fmt: skip
    return {
        "schema": benchmark.SCHEMA, "status": "completed", "command": "benchmark_suite.py", "date": "2026-11-21T00:00:00Z",
        "device": record()["device"], "environment": record()["environment"], "packages": {"transformers": "5.0"},
        "model": ModelConfig().model_dump(), "precision": {"compute": "fp32"}, "seed": 0, "models": list(models),
        "metrics": list(metrics), "batch_sizes": [4, 8], "sequence_lengths": [8, 16], "steps": 10, "repeats": 2,
        "accuracy_steps": 20, "cells": cells, "accuracy": accuracy,
    }  # fmt: skip


def test_ratios_are_against_v1():
    header, rows = benchmark.throughput_table(made_up())
    assert header == ["B", "S", "v1", "v2"]
    assert rows[0] == [4, 8, "1,000", "2,000 (2.00x)"] and rows[-1] == [8, 16, "1,000", "out of memory"]
    assert benchmark.memory_table(made_up())[1][0] == [4, 8, "800", "600 (1.33x)"]


def test_without_v1_the_first_model_is_the_reference():
    assert benchmark.throughput_table(made_up(("v2", "hf")))[1][0] == [4, 8, "2,000", "1,000 (0.50x)"]
    assert benchmark.throughput_table(made_up(("v2", "hf")))[1][-1] == [8, 16, "out of memory", "1,000"]
    assert benchmark.reference(made_up(("hf", "v1"))) == "v1"


def test_the_range_of_a_speedup_is_that_of_the_repeats():
    rows = {tuple(row[:3]): row[3:] for row in benchmark.step_table(made_up())[1]}
    assert rows["v2", 4, 8] == [pytest.approx(16.0), "14.4 to 17.6", pytest.approx(2.0), "1.67 to 2.5"]
    assert rows["v1", 4, 8][2:] == [None, ""] and ("v2", 8, 16) not in rows


def test_growth_along_batch_and_sequence():
    header, rows = benchmark.scaling_table(made_up())
    growth = {tuple(row[:3]): row[3:] for row in rows}
    assert growth["v1", "B 4 to 8", "S 8"] == [2, 2, 1, 1] and growth["v1", "S 8 to 16", "B 4"] == [2, 2, 1, 2]
    assert ("v2", "S 8 to 16", "B 8") not in growth and len(growth) == 4 + 2 and len(header) == 7


def analyzed(measured: dict, folder: Path) -> tuple[str, str]:
    """What is printed, and the Markdown report; benchmark.* are in the folder."""
    write_json(folder / "benchmark.json", measured)
    printed = benchmark.analyze(folder / "benchmark.json").publish(folder, "benchmark")
    return printed, (folder / "benchmark.md").read_text()


def test_files_hold_every_cell_and_what_is_missing(tmp_path):
    for shown in analyzed(made_up(), tmp_path):
        assert "2,000 (2.00x)" in shown and "out of memory: CUDA" in shown and "transformers 5.0" in shown
        assert "Peak of PyTorch's allocator" in shown and "At B 4, S 8 only" in shown and "+1.0e-03" in shown
        assert "Noisy" not in shown
    with (tmp_path / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and rows[1]["model"] == "v2" and float(rows[1]["speedup"]) == pytest.approx(2.0)
    assert rows[-1]["status"] == "out of memory" and rows[-1]["ms"] == ""
    assert tuple(rows[0]) == benchmark.COLUMNS
    assert (tmp_path / "benchmark.png").read_bytes()[:4] == b"\x89PNG"


def test_a_noisy_cell_is_named(tmp_path):
    measured = made_up()
    for run in measured["cells"][0]["runs"]:
        run["step_ms"]["p80"] = 2 * run["step_ms"]["median"]
    _, report = analyzed(measured, tmp_path)
    assert "v1 B 4 S 8 (110 %)." in report


def test_runs_of_a_gpu_may_hold_what_the_pools_held(tmp_path):
    measured = made_up()
    for cell in measured["cells"]:
        cell["runs"] = [run | {"reserved_mib": 2000.0} for run in cell["runs"]]
    analyzed(measured, tmp_path)
    measured["cells"][0]["runs"][0]["reserved_mib"] = "2000"
    with pytest.raises(UsageError, match="benchmark.json: cells.0.runs.0.reserved_mib: "):
        analyzed(measured, tmp_path)


@pytest.mark.parametrize(
    "metrics, shown, hidden", [(["memory"], "Peak MiB", "Tokens/s"), (["throughput"], "Tokens/s", "Peak MiB")]
)
def test_only_what_was_asked_for_is_shown(metrics, shown, hidden, tmp_path):
    text, _ = analyzed(made_up(metrics=metrics) | {"accuracy": []}, tmp_path)
    assert shown in text and hidden not in text and "Accuracy" not in text


def test_accuracy_alone_needs_no_plot(tmp_path):
    assert "minus v1's" in analyzed(made_up(metrics=["accuracy"]) | {"cells": []}, tmp_path)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.json", "benchmark.md"]


def test_more_models_than_colours_are_told_apart():
    measured = made_up([f"m{i}" for i in range(9)])
    throughput, *_ = benchmark.figure(measured, "a title").axes
    assert len({(line.get_color(), line.get_marker()) for line in throughput.lines}) == 9


def test_nothing_measured_is_an_error_that_says_why(tmp_path):
    measured = made_up()
    for entry in measured["cells"] + measured["accuracy"]:
        entry |= {"status": "failed", "reason": "no compiler", "runs": []}
    write_json(tmp_path / "benchmark.json", measured | {"device": None, "environment": None})
    with pytest.raises(RunError, match="nothing was measured; the first: v1, failed: no compiler"):
        benchmark.analyze(tmp_path / "benchmark.json")


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps({"schema": "tiny-llama-run/1"}))
    with pytest.raises(UsageError, match="tiny-llama-benchmark/1"):
        benchmark.analyze(tmp_path / "other.json")
