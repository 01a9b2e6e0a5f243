"""Numerical validation: equal versions pass, each kind of mistake is found and named, any two files can be loaded."""

import re
import sys
from pathlib import Path
from types import ModuleType

from common.errors import RunError, UsageError
from common.studies import accuracy
from common.training import version_files
from tests.conftest import ROOT, V1

import pytest
import torch

V2 = ROOT / "version2_pytorch_fused"
SCRIPT, BASELINE, FUSED = V2 / "validate_numerical_accuracy.py", V1 / "tiny_llama_v1.py", V2 / "tiny_llama_v2.py"
SMALL = """
model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48, vocab_size: 50}
training: {batch_size: 2, sequence_length: 9}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


def options(config: Path, *flags: str):
    return version_files.resolve(version_files.parser(None).parse_args(["--config", str(config), "--device", "cpu", *flags]))


def altered(folder: Path, old: str, new: str) -> Path:
    """Version 1 with one expression replaced."""
    source = BASELINE.read_text()
    assert old in source
    (folder / "altered.py").write_text(source.replace(old, new))
    return folder / "altered.py"


def compare(config: Path, optimized: Path, *flags: str, own: tuple[str, ...] = ()) -> accuracy.Comparison:
    return accuracy.compare(version_files.load(BASELINE), version_files.load(optimized), options(config, *flags), list(own))


def test_the_fused_version_passes_and_the_worst_is_named(run_script, config):
    done = run_script(SCRIPT, "--baseline", BASELINE, "--optimized", FUSED, "--tolerance", "1e-4", "--config", config)
    lines = done.stdout.splitlines()
    first = lines[1].split("  ")[0]
    assert lines[-1].startswith(f"PASS: the worst is {first}, error ")
    assert len([line for line in lines if line.startswith("gradient of ")]) == 2 * 9 + 2  # each weight of Version 1 once
    assert "different precision" not in done.stdout


def test_past_the_tolerance_is_exit_code_1(run_script, config):
    arguments = ("--baseline", BASELINE, "--optimized", FUSED, "--config", config)
    assert "FAIL: " in run_script(SCRIPT, *arguments, "--tolerance", "1e-12", check=1).stdout
    assert not accuracy.report(compare(config, FUSED), float("nan"))[1]


def test_the_optimized_versions_own_flags_reach_it(run_script, config):
    arguments = ("--baseline", BASELINE, "--optimized", FUSED, "--config", config, "--tolerance", "0")
    run_script(SCRIPT, *arguments, "--disable-all-fusion")  # bit for bit
    run_script(SCRIPT, *arguments, check=1)
    done = run_script(SCRIPT, *arguments, "--disable-everything", check=2)
    assert "--disable-everything" in done.stderr and done.stderr.count("\n") == 1


def test_rows_are_sorted_and_rounding_is_a_yardstick(config):
    rows = compare(config, FUSED).rows
    assert [row.error for row in rows] == sorted((row.error for row in rows), reverse=True)
    assert {"logits", "loss", "gradient of layers.1.self_attn.k_proj.weight"} <= {row.name for row in rows}
    assert all(0 <= row.rounding < 1e-5 for row in rows) and max(row.rounding for row in rows) > 1e-8
    assert rows[0].error < 100 * max(row.rounding for row in rows)


@pytest.mark.parametrize("flags", [(), ("--use-amp",)], ids=["fp32", "bf16"])
def test_errors_against_float64(config, flags):
    baseline, fused, chosen = version_files.load(BASELINE), version_files.load(FUSED), options(config, *flags)
    expected = {row.name: row.rounding for row in compare(config, FUSED, *flags).rows}
    assert accuracy.errors_against_float64(baseline, baseline, chosen, []) == expected
    assert accuracy.errors_against_float64(baseline, fused, chosen, ["--disable-all-fusion"]) == expected
    found = accuracy.errors_against_float64(baseline, fused, chosen, [])
    assert found.keys() == expected.keys() and found != expected and max(found.values()) < 10 * max(expected.values())


@pytest.mark.parametrize("dtype, short", [("bfloat16", "bf16"), ("float16", "fp16")])
def test_different_precision_is_said_and_its_rounding_shown(config, dtype, short):
    comparison = compare(config, FUSED, "--use-amp", "--amp-dtype", dtype)
    assert comparison.formats == ("fp32", short)
    worst = comparison.rows[0]
    assert 1e-4 < worst.error < 0.2 and worst.error < 20 * max(row.rounding for row in comparison.rows)
    text, passed = accuracy.report(comparison, 1e-4)
    assert not passed and f"different precision: baseline fp32, optimized {short}" in text


@pytest.mark.parametrize(
    "old, new, tensor",
    [
        (".triu(diagonal=1)", ".triu(diagonal=2)", "logits"),  # sees one token of the future
        ("rms_norm(x, self.weight, self.eps)", "rms_norm(x, self.weight / self.weight, self.eps)", "logits"),  # weights forgotten
        ("repeat_interleave(groups, dim=1)", "repeat(1, groups, 1, 1)", "logits"),  # another head's keys
        (
            "q, k = apply_rope(q, k, cos, sin)",
            "k = apply_rope(q, k, cos, sin)[1]",
            "gradient of layers.0.self_attn.q_proj.weight",
        ),
        ("return F.silu(gate) * up", "return F.silu(gate.detach()) * up + 0 * gate", "gradient of layers.0.mlp.gate_proj.weight"),
    ],
)
def test_a_mistake_is_found(config, tmp_path, old, new, tensor):
    errors = {row.name: row.error for row in compare(config, altered(tmp_path, old, new)).rows}
    assert errors[tensor] > 1e-2


def test_results_that_are_no_numbers_fail(config, tmp_path):
    wrong = altered(tmp_path, "return F.silu(gate) * up", "return F.silu(gate) * up * float('nan')")
    comparison = compare(config, wrong)
    assert comparison.rows[0].error == float("inf") and not accuracy.report(comparison, 1e9)[1]


def test_a_weight_without_gradient_is_an_error(config, tmp_path):
    wrong = altered(tmp_path, "return self.down_proj(swiglu", "return self.down_proj.requires_grad_(False)(swiglu")
    with pytest.raises(RunError, match=r"layers.0.mlp.down_proj.weight gets no gradient"):
        compare(config, wrong)


def test_weights_that_do_not_come_back_are_an_error(config, tmp_path):
    wrong = altered(
        tmp_path, "        return self.state_dict()", "        return {k: v + 1 for k, v in self.state_dict().items()}"
    )
    with pytest.raises(RunError, match="do not come back"):
        compare(config, wrong)
    renamed = altered(tmp_path, "o_proj", "out_proj")
    with pytest.raises(RunError, match="do not load: missing .*out_proj"):
        compare(config, renamed)


@pytest.mark.parametrize(
    "expected, got, error", [([2.0, -4.0], [2.0, -3.0], 0.25), ([0.0], [0.0], 0.0), ([0.0], [1.0], float("inf"))]
)
def test_the_error_is_relative_to_the_largest_element(expected, got, error):
    assert accuracy.error(torch.tensor(expected), torch.tensor(got)) == error


# ------------------------------------------------------------------------------------------------------------ loading


def test_two_versions_with_one_name_do_not_mix(tmp_path, monkeypatch):
    loaded_before = ModuleType("kernels")
    monkeypatch.setitem(sys.modules, "kernels", loaded_before)
    found = []
    for name in ("first", "second"):
        (tmp_path / name / "kernels").mkdir(parents=True)
        (tmp_path / name / "kernels" / "__init__.py").touch()
        (tmp_path / name / "kernels" / "norm.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / "version.py").write_text(
            "from kernels.norm import NAME\nTinyLlama = make_model = make_optimizer = train_step = None\n"
        )
        found.append(version_files.load(tmp_path / name / "version.py"))
    assert [module.NAME for module in found] == ["first", "second"]
    assert found[0].__name__ != found[1].__name__ and sys.modules["kernels"] is loaded_before
    assert not any(str(tmp_path) in entry for entry in sys.path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.py", None, "is not a Python file"),
        ("notes.txt", "hello", "is not a Python file"),
        ("half.py", "class TinyLlama: pass\ndef make_model(options): pass\n", "it has no make_optimizer, train_step"),
    ],
)
def test_a_file_that_is_no_version_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        version_files.load(tmp_path / name)


@pytest.mark.parametrize("wrong", [("--optimized", "missing.py"), ("--optimized", FUSED, "--seq-len", "0"), ()])
def test_bad_input_is_one_line(refused, wrong):
    refused(SCRIPT, "--baseline", BASELINE, *wrong)
