"""The benchmark: peers compute what Version 1 does, cells are measured in turn, failures are results, ratios follow."""

import csv
import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

from common.config import ModelConfig
from common.errors import RunError, UsageError
from common.files import read_json, write_json
from common.precision import Precision
from common.studies import accuracy, benchmark, external_baselines
from common.training import version_files
from tests.conftest import PATHS, ROOT, V1

import pytest
import torch

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "benchmark_suite.py"
SMALL = """
model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48, vocab_size: 50}
"""
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_sequence_length=16, rope_theta=500.0, rms_norm_eps=1e-3,
)  # fmt: skip


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


# --------------------------------------------------------------------------------------------------------------- peers


def pair(dtype: torch.dtype | None = None):
    """Version 1 and hf with the same initial weights, a batch of each and a precision."""
    pytest.importorskip("transformers")
    baseline = version_files.load(V1 / "tiny_llama_v1.py")
    torch.manual_seed(3)
    ours, theirs = baseline.TinyLlama(CONFIG), external_baselines.PEERS["hf"].make_model(Namespace(model=CONFIG))
    batch = version_files.random_batch(Namespace(seed=0, model=CONFIG, batch_size=2, seq_len=9), torch.device("cpu"))
    return baseline, ours, theirs, batch, Precision(torch.device("cpu"), dtype)


def test_hf_starts_from_the_weights_of_version_1():
    _, ours, theirs, _, _ = pair()
    state, their_state = ours.baseline_state_dict(), theirs.baseline_state_dict()
    assert state.keys() == their_state.keys() and all(torch.equal(state[name], their_state[name]) for name in state)
    assert theirs.llama.lm_head.weight is theirs.llama.model.embed_tokens.weight
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


def test_hf_has_the_logits_loss_and_gradients_of_version_1():
    _, ours, theirs, batch, precision = pair()
    state = accuracy.weights(ours)  # with norms that are not 1
    for model in (ours, theirs):
        accuracy.exchange(model, state)
    expected, got = (accuracy.outputs(model, batch, precision) for model in (ours, theirs))
    assert expected.keys() == got.keys()
    for name in expected:
        assert accuracy.error(expected[name], got[name]) < 1e-5, name


@pytest.mark.parametrize("dtype, tolerance", [(None, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_hf_learns_as_version_1_does(dtype, tolerance):
    baseline, ours, theirs, batch, precision = pair(dtype)
    losses = []
    for version, model in ((baseline, ours), (external_baselines.PEERS["hf"], theirs)):
        optimizer = version.make_optimizer(model, Namespace(learning_rate=1e-2))
        losses.append([version.train_step(model, optimizer, batch, precision).item() for _ in range(6)])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance) and losses[0][-1] < 0.8 * losses[0][0]
    assert all(parameter.dtype == torch.float32 for parameter in theirs.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_hf_builds_no_attention_mask(compiled, monkeypatch):
    _, _, theirs, batch, _ = pair()
    calls = []
    if compiled:

        def backend(graph, inputs):
            calls.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
            return graph

        torch.compile(theirs.loss, backend=backend)(*batch)
    else:
        real = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or real(*a, **k))
        theirs.loss(*batch)
    assert len(calls) == CONFIG.num_layers
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)


@pytest.mark.parametrize(
    "name, absent, message",
    [
        ("hf", "transformers", "hf needs what is not installed here: pip install 'transformers>=4.51'"),
        ("liger", "liger_kernel", "pip install --no-deps liger-kernel"),
        ("liger", None, "liger needs an NVIDIA or AMD GPU"),
    ],
)
def test_a_peer_that_cannot_run_says_what_is_missing(name, absent, message, monkeypatch):
    monkeypatch.setattr(external_baselines.importlib.util, "find_spec", lambda module: None if module == absent else object())
    with pytest.raises(UsageError) as raised:
        external_baselines.PEERS[name].check(torch.device("cpu"))
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.gpu
def test_liger_has_the_gradients_of_version_1():
    pytest.importorskip("liger_kernel")
    options = version_files.resolve(version_files.parser(None).parse_args(["--seq-len", "33", "--device", "cuda"]))
    errors = accuracy.errors_against_float64(
        version_files.load(V1 / "tiny_llama_v1.py"), external_baselines.PEERS["liger"], options, []
    )
    assert max(errors.values()) < 1e-4


# ----------------------------------------------------------------------------------------------------------- one process


def test_the_steps_of_a_process_and_the_loss_after_them(monkeypatch):
    losses = []

    def step(batch):
        losses.append(float(len(losses)))
        return torch.tensor(losses[-1])

    monkeypatch.setattr(benchmark, "built", lambda *_: (step, Precision(torch.device("cpu"), None)))
    errors = {"logits": 0.1, "gradient of a": 1.0, "gradient of b": 2.0}
    monkeypatch.setattr(accuracy, "errors_against_float64", lambda *_: errors)
    model = Namespace(load=lambda: None, flags=())
    settings = Namespace(model=ModelConfig(), batch_size=1, seq_len=4, seed=0)
    found = benchmark.accuracy(model, model, settings, steps=3)
    assert found["loss"] == 3 and (found["logits_error"], found["gradient"], found["gradient_error"]) == (0.1, "b", 2.0)
    losses.clear()
    assert benchmark.speed(model, settings, steps=5)["step_ms"]["count"] == 5
    assert len(losses) == benchmark.WARMUP + 1 + 5


# --------------------------------------------------------------------------------------------------------------- plans


def options(config: Path, **changes) -> Namespace:
    chosen = dict(
        models=["v1", "v2"], metrics=["throughput", "memory"], batch_sizes=[4, 2], seq_lengths=[8], num_steps=2, repeats=2,
        accuracy_steps=2, timeout=100, preset="tiny", config=config, seed=0, device="cpu", use_amp=False, amp_dtype=None,
    )  # fmt: skip
    return Namespace(**chosen | changes)


def test_versions_are_found_as_they_come(tmp_path):
    for name in ("version1_a/tiny_llama_v1.py", "version3_b/tiny_llama_v3.py", "version3_b/tiny_llama_v3_config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(benchmark.known_models(tmp_path)) == ["v1", "v3", *external_baselines.PEERS]  # no v2, so no v2-compile
    known = benchmark.known_models(ROOT)
    assert {"v1", "v2", "v2-compile"} <= known.keys() and known["v2-compile"].flags == ("--enable-torch-compile",)
    assert known["v2-compile"].load().__file__ == str(V2 / "tiny_llama_v2.py")


def test_shapes_are_resolved_smallest_first(config):
    models, shapes = benchmark.plan(options(config, seq_lengths=[300, 8]), benchmark.known_models(ROOT))
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


def measured_with(outcome, config, path, **changes) -> tuple[int, list, dict]:
    """What `measure` makes of a process that answers outcome(what, model, batch_size, calls before)."""
    calls = []

    def answer(what, model, baseline, shape):
        calls.append((model.name, shape.batch_size) if what == "runs" else (model.name, what))
        found = {"device": {"name": "A CPU"}, "environment": {"torch": "2.13.0"}, "status": "ok"}
        run = {"step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2}, "peak_mib": 5.0, "kind": "GPU allocator"}
        return found | run | outcome(model.name, shape.batch_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "run_process", answer)
        models, shapes = benchmark.plan(options(config, **changes), benchmark.known_models(ROOT))
        code = benchmark.measure(models, shapes, benchmark.known_models(ROOT)["v1"], path)
    return code, calls, read_json(path, benchmark.SCHEMA)


def test_models_are_measured_in_turn(config, tmp_path):
    code, calls, measured = measured_with(lambda *_: {}, config, tmp_path / "b.json")
    assert code == 0 and calls == [("v1", 2), ("v2", 2), ("v1", 2), ("v2", 2), ("v1", 4), ("v2", 4), ("v1", 4), ("v2", 4)]
    assert measured["status"] == "completed" and measured["device"] == {"name": "A CPU"}
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2] * 4 and measured["accuracy"] == []


def test_accuracy_is_taken_at_the_smallest_shape_alone(config, tmp_path):
    found = {"loss": 1.0, "gradient_error": 0.1}
    _, calls, measured = measured_with(lambda *_: found, config, tmp_path / "b.json", metrics=["accuracy"])
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
    assert f"v2, B 2, S 8: {status}: why" in benchmark.problems(measured)


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
    text = benchmark.analyze(tmp_path / "benchmark.json", tmp_path)
    assert "v2, B 4, S 8: not run" in text and "The run was interrupted" in (tmp_path / "benchmark.md").read_text()


def failing(folder: Path, name: str, code: str) -> benchmark.Model:
    """Version 1 whose training step runs this code first."""
    source = (V1 / "tiny_llama_v1.py").read_text()
    head = '    """One optimizer step; returns the loss from before it, on the device."""\n'
    assert head in source
    (folder / f"{name}.py").write_text(source.replace(head, f"{head}    {code}\n"))
    return benchmark.Model(name, str(folder / f"{name}.py"))


@pytest.mark.parametrize(
    "code, status, reason",
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "out of memory", "OutOfMemoryError: CUDA out of memory"),
        ("raise ValueError('two\\n lines')", "failed", "ValueError: two lines"),
    ],
    ids=["memory", "error"],
)
def test_an_exception_in_a_process_is_a_status(code, status, reason, config, tmp_path, monkeypatch):
    told = {name: value for name, value in vars(options(config)).items() if name in benchmark.TOLD}
    told |= {"batch_size": 2, "seq_len": 8, "config": str(config)}
    model, result = failing(tmp_path, "broken", code), tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["", json.dumps(["runs", model, model, told, 2, 2, str(result)])])
    benchmark.main()
    outcome = read_json(result)
    assert (outcome["status"], outcome["reason"]) == (status, reason) and outcome["device"]["kind"] == "cpu"


@pytest.mark.parametrize(
    "code, status, reason",
    [
        ("import os; os.kill(os.getpid(), 9)", "out of memory", "killed by the system (SIGKILL)"),
        ("import os; print('\\nlast words', flush=True); os._exit(3)", "failed", "last words"),
    ],
    ids=["killed", "exit"],
)
def test_the_end_of_a_process_is_a_status(code, status, reason, config, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATHS)
    model = failing(tmp_path, "broken", code)
    _, shapes = benchmark.plan(options(config), benchmark.known_models(ROOT))
    outcome = benchmark.run_process("runs", model, model, shapes[0])
    assert outcome["status"] == status and outcome["reason"].startswith(reason)


def test_a_process_that_takes_too_long_is_ended(config, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATHS)
    models, shapes = benchmark.plan(options(config, timeout=0.2), benchmark.known_models(ROOT))
    outcome = benchmark.run_process("runs", models[0], models[0], shapes[0])
    assert outcome == {"status": "timed out", "reason": "not done after 0.2 s"}


def test_a_whole_benchmark(run_script, config, tmp_path):
    names = ["v1", "hf" if external_baselines.importlib.util.find_spec("transformers") else "v2"]
    done = run_script(
        SCRIPT, "--models", ",".join(names), "--batch-sizes", "2", "--seq-lengths", "9", "--config", config, "--num-steps", "2",
        "--repeats", "1", "--accuracy-steps", "3", "--metrics", "throughput,memory,accuracy",
    )  # fmt: skip
    assert (
        f"{2 * len(names):4d} of {2 * len(names)}" in done.stdout and "Peak resident memory of the whole process" in done.stdout
    )
    folder = tmp_path / "benchmark_suite"
    assert sorted(path.name for path in folder.iterdir()) == [f"benchmark.{kind}" for kind in ("csv", "json", "md", "png")]
    measured = read_json(folder / "benchmark.json", benchmark.SCHEMA)
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
        "device": {"name": "A GPU"}, "environment": {"torch": "2.13.0"}, "packages": {"transformers": "5.0"},
        "model": CONFIG.model_dump(), "precision": {"compute": "fp32"}, "seed": 0, "models": list(models),
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


def test_files_hold_every_cell_and_what_is_missing(tmp_path):
    write_json(tmp_path / "benchmark.json", made_up())
    text = benchmark.analyze(tmp_path / "benchmark.json", tmp_path)
    report = (tmp_path / "benchmark.md").read_text()
    for shown in (text, report):
        assert "2,000 (2.00x)" in shown and "v2, B 8, S 16: out of memory: CUDA" in shown and "transformers 5.0" in shown
        assert "Peak of PyTorch's allocator" in shown and "At B 4, S 8 only" in shown and "+1.0e-03" in shown
    with (tmp_path / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and rows[1]["model"] == "v2" and float(rows[1]["speedup"]) == pytest.approx(2.0)
    assert rows[-1]["status"] == "out of memory" and rows[-1]["ms"] == ""
    assert (tmp_path / "benchmark.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "metrics, shown, hidden", [(["memory"], "Peak MiB", "Tokens/s"), (["throughput"], "Tokens/s", "Peak MiB")]
)
def test_only_what_was_asked_for_is_shown(metrics, shown, hidden, tmp_path):
    write_json(tmp_path / "benchmark.json", made_up(metrics=metrics) | {"accuracy": []})
    text = benchmark.analyze(tmp_path / "benchmark.json", tmp_path)
    assert shown in text and hidden not in text and "Accuracy" not in text


def test_accuracy_alone_needs_no_plot(tmp_path):
    write_json(tmp_path / "benchmark.json", made_up(metrics=["accuracy"]) | {"cells": []})
    assert "minus v1's" in benchmark.analyze(tmp_path / "benchmark.json", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.json", "benchmark.md"]


def test_nothing_measured_is_an_error_that_says_why(tmp_path):
    measured = made_up()
    for entry in measured["cells"] + measured["accuracy"]:
        entry |= {"status": "failed", "reason": "no compiler", "runs": []}
    write_json(tmp_path / "benchmark.json", measured | {"device": None, "environment": None})
    with pytest.raises(RunError, match="nothing was measured; the first: v1, failed: no compiler"):
        benchmark.analyze(tmp_path / "benchmark.json", tmp_path)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps({"schema": "tiny-llama-run/1"}))
    with pytest.raises(UsageError, match="tiny-llama-benchmark/1"):
        benchmark.analyze(tmp_path / "other.json", tmp_path)
