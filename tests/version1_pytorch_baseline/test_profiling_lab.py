"""The commands of the profiling lab and its experiments; tests/test_exercises.py runs its own tests."""

import os
import re
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

from common.documents import lab_dashboard
from common.errors import UsageError
from common.files import read_json, write_json
from common.records import lab_file
from tests.conftest import PATHS, ROOT, V1, finished

import experiments
import pytest
import torch

LAB = V1 / "exercises" / "profiling_lab"
SMALL = ("--seq-len", 16, "--d-model", 32, "--num-heads", 4, "--batch-size", 2, "--seq-lens", "16,32", "--device", "cpu")
QUICK_PARTS = [part for part in lab_dashboard.PARTS if part != "fixes"]  # each fix takes a process


# ------------------------------------------------------------------------------------------------------------ run_lab


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The file that run_lab.py writes with small sizes, without torch.compile."""
    folder = tmp_path_factory.mktemp("lab")
    environment = os.environ | {
        "PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    command = [sys.executable, LAB / "run_lab.py", "--output", "profiling_lab.json", "--parts", *QUICK_PARTS, *SMALL]
    done = finished(command, folder, environment, seconds=300)
    assert "qkv_projection" in done.stdout and "written: profiling_lab.json" in done.stdout
    return folder / "profiling_lab.json"


def test_the_results_hold_every_part_and_its_conditions(measured):
    result = read_json(measured, lab_file.SCHEMA)
    assert {"command", "date", "device", "environment", "jax", "ceilings"} <= result.keys()
    assert result["precision"] == "fp32" and result["sizes"]["seq_lens"] == [16, 32]
    assert all(result[part] for part in QUICK_PARTS) and result["fixes"] is None
    assert {row["bound"] for row in result["components"]["pytorch"]} <= {"compute", "memory", "launch"}
    assert [row["seq_len"] for row in result["memory"]] == [16, 32]


def sections(page: str) -> set[str]:
    return set(re.findall(r'<section id="([^"]*)"', page))


def test_the_page_holds_the_results_and_needs_nothing_else(measured, execute, tmp_path):
    execute(ROOT / "page.py", measured, "--output", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"""<(script|img|iframe|link(?! rel=["']?icon))\b""", page)
    targets = re.findall(r"""\b(?:src|href)=["']?([^"'\s>]*)""", page)
    assert all(target.startswith(("#", "data:")) for target in targets if target)
    assert page.count("<svg") == 5
    assert sections(page) == {*QUICK_PARTS, "conditions", "roofline", "missing"} and "Four fixes: run_lab.py" in page


@pytest.mark.parametrize("part", QUICK_PARTS)
def test_tables_for_documents(measured, part):
    table = lab_dashboard.TABLES[f"lab-{part}"](measured.parent, measured.parent).splitlines()
    assert table[0].startswith("| device |") and len({row.count("|") for row in table}) == 1
    assert set(Counter(table[2:]).values()) == {2}  # the same folder twice


def test_a_table_needs_its_file_and_its_part(measured, tmp_path):
    with pytest.raises(UsageError, match="no profiling_lab.json"):
        lab_dashboard.TABLES["lab-layer"](tmp_path)
    with pytest.raises(UsageError, match="fixes was not measured"):
        lab_dashboard.TABLES["lab-fixes"](measured.parent)


@pytest.mark.parametrize(("arguments", "message"), [
    (("--d-model", 30, "--num-heads", 4), "--d-model 30 is not divisible by --num-heads 4"),
    (("--parts", "everything"), "invalid choice: 'everything'"),
    (("--seq-lens", "16,x"), "'x' is not a positive whole number"),
    (("--output", "file/lab.json"), "--output: cannot write in file"),
], ids=["heads", "part", "length", "folder"])  # fmt: skip
def test_run_lab_refuses(refused, tmp_path, arguments, message):
    (tmp_path / "file").touch()
    assert message in refused(LAB / "run_lab.py", "--output", "lab.json", *arguments)
    assert not (tmp_path / "lab.json").exists()


@pytest.fixture
def own_profiling(monkeypatch):
    """Imports `profiling` anew, from the folder that the test asks for."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "profiling", raising=False)
    yield
    sys.modules.pop("profiling", None)


@pytest.mark.parametrize(
    "problem, printed", [("time", "us of x + 1: ["), ("memory", "x + 1 32.0"), ("intensity", "softmax (8, 128, 128) 1.25")]
)
def test_the_values_of_a_problem(execute, own_profiling, problem, printed):
    assert printed in execute(LAB / "try_it.py", problem, "--implementation", "solution", "--device", "cpu").out


@pytest.mark.parametrize("command, named", [
    (("try_it.py", "time"), "benchmark_function: problem 1 in README.md"),
    (("run_lab.py", "--output", "lab.json", "--implementation", "starter", "--parts", "components", *SMALL),
     "profile_attention_components: problem 3 in README.md"),
], ids=["try_it", "run_lab"])  # fmt: skip
def test_a_function_that_is_still_to_be_written_is_named_in_one_line(refused, own_profiling, known_ceilings, command, named):
    assert named in refused(LAB / command[0], *command[1:])


def test_two_devices_side_by_side(execute, tmp_path):
    files = [ROOT / "results" / device / lab_dashboard.FILE for device in ("cpu", "h100")]
    execute(ROOT / "page.py", *files, "--output", "two.html")
    page = re.sub(r"</td><td[^>]*>", "|", (tmp_path / "two.html").read_text())
    cpu, gpu = (read_json(path, lab_file.SCHEMA) for path in files)
    ways = [next(row["ms"] for row in result["bottlenecks"] if row["way"] == "addcmul") for result in (cpu, gpu)]
    found = re.search(r"memory bandwidth\|addcmul\|ms\|(\S+)\|(\S+)\|([\d.]+)<", page)
    assert [float(number) for number in found.groups()] == pytest.approx([*ways, ways[0] / ways[1]], rel=0.01)
    assert "PyTorch|qkv_projection|bound|compute|launch|" in page
    assert "transfer|already on the device|ms||" in page, "a row that one device lacks has one value"
    assert {*lab_dashboard.PARTS, "conditions"} - {"fixes"} <= sections(page)


@pytest.mark.slow
def test_everything_measured_as_documented(run_script, tmp_path):
    run_script(LAB / "run_lab.py", "--output", "lab.json", "--num-steps", 2, *SMALL)
    result = read_json(tmp_path / "lab.json", lab_file.SCHEMA)
    assert [row["fix"] for row in result["fixes"]] == list(experiments.FIXES) and len(result["optimizations"][0]["ms"]) == 4
    run_script(ROOT / "page.py", "lab.json", "--output", "lab.html")
    assert "Not measured" not in (tmp_path / "lab.html").read_text()


# -------------------------------------------------------------------------------------------------------- experiments


@pytest.fixture
def options(tmp_path) -> Namespace:
    """A model of two small layers."""
    model = "model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 64}"
    (tmp_path / "small.yaml").write_text(f"{model}\ntraining: {{batch_size: 2, sequence_length: 16}}\n")
    return experiments.resolve(Namespace(config=tmp_path / "small.yaml", device="cpu", num_steps=3))


def operators_of(step) -> Counter:
    with torch.profiler.profile() as profile:
        step()
    return Counter(event.name for event in profile.events())


def test_fixes_train_alike_and_change_what_they_name(options, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    losses, ran = {}, {}
    for fix in experiments.FIXES:
        step = experiments.training_step(fix, options)
        losses[fix] = [step().item() for _ in range(3)]
        ran[fix] = operators_of(step)
    plain = losses.pop("none")
    for fix, values in losses.items():
        tolerance = 0.05 if fix == "mixed precision" else 1e-5
        assert values == pytest.approx(plain, abs=tolerance), fix
    assert losses["mixed precision"] != plain and losses["torch.compile"] == plain and len(compiled) == 1
    assert ran["none"]["aten::_softmax"] == 2 and ran["flash attention"]["aten::_softmax"] == 0
    assert ran["gradient checkpointing"]["aten::_softmax"] == 4  # each layer's forward pass twice


def test_a_measured_fix(options):
    row = experiments.measure_fix("none", options)
    assert row["step_ms"]["count"] == 3 and row["peak_mib"] > 0 and row["kind"] == "process RSS" and 0 < row["loss"] < 10
    header, rows = lab_dashboard.fixes([row, row | {"fix": "other", "step_ms": row["step_ms"] | {"median": 1e6}}])
    assert rows[0][header.index("against none")] == "1.00x" and rows[1][header.index("against none")] == "0.00x"


def test_a_layer_by_span(options):
    layer = experiments.layer(options)
    assert {"attention", "mlp", "norm", "residual"} <= layer["spans"].keys() and not layer["on_gpu"]
    assert all(layer["spans"][name][phase] > 0 for name in ("attention", "mlp", "norm") for phase in ("forward", "backward"))
    rows = lab_dashboard.layer(layer)[1]
    assert sum(row[-1] for row in rows) == pytest.approx(100) and all(0 <= row[-1] <= 100 for row in rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", experiments.BOTTLENECKS, ids=lambda make: make.__name__)
def test_all_ways_do_the_same_work(make, device):
    ways = make(torch.device(device), 256)
    assert bool(ways) == (device == "cuda" or make is not experiments.transfer)
    results = [way() for way in ways.values()]
    if make is experiments.launch_overhead:  # works in place, on zeros
        assert list(ways)[0] == "4 operations"
    else:
        assert all(torch.equal(*(torch.as_tensor(each).cpu() for each in (result, results[0]))) for result in results)


def test_bottlenecks_are_compared_with_the_mistake():
    measured = list(experiments.bottlenecks(torch.device("cpu"), smaller=16))
    ways = {"memory_bandwidth": 2, "launch_overhead": 3, "prefetching": 2, "synchronization": 2}
    assert Counter(row["bottleneck"] for row in measured) == ways
    rows = lab_dashboard.bottlenecks(measured)[1]
    first = ("mul, then add", "32 operations", "each batch copied, then used", ".item() each time")
    assert [row[-1] for row in rows if row[1] in first] == ["1.00x"] * 4


def test_an_experiment_as_a_command(capsys, monkeypatch):
    asked = []
    layer = {"ms": 1.0, "profiled_ms": 2.0, "on_gpu": False, "spans": {"attention": {"forward": 0.5, "backward": 1.0}}}
    monkeypatch.setattr(experiments, "layer", lambda options: asked.append(options) or layer)
    monkeypatch.setattr(sys, "argv", ["experiments.py", "layer", "--device", "cpu", "--preset", "small"])
    assert not experiments.main()
    assert re.search(r"^attention +0.5 +1 +75$", capsys.readouterr().out, re.MULTILINE) and asked[0].model.hidden_size == 512


def test_results_of_a_gpu_fill_the_same_tables(measured, tmp_path):
    """A file as a GPU would write it: no CPU threads, kernels, more ways."""
    result = read_json(measured, lab_file.SCHEMA)
    result["device"] = {"kind": "cuda", "name": "GPU X", "memory_mib": 1, "multiprocessors": 1}
    result["layer"]["on_gpu"] = True
    result["components"]["jax"] = result["components"]["pytorch"]
    write_json(tmp_path / lab_dashboard.FILE, result)
    layer = lab_dashboard.TABLES["lab-layer"](tmp_path)
    assert "| GPU X | attention |" in layer and "| idle GPU |" in layer
    rows = lab_dashboard.TABLES["lab-components"](tmp_path).splitlines()
    torch_row, jax_row = (row.partition("softmax")[2] for row in rows if "| softmax |" in row)
    assert torch_row == jax_row  # with the memory
    assert "GPU X" in lab_dashboard.analyze(tmp_path / lab_dashboard.FILE).html()
