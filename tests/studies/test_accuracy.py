"""Numerical validation: equal versions pass, and each kind of mistake is found and named."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from common.rmsnorm import rms_norm
from common.rope import apply_rope
from studies import accuracy, version_files
from tests import study_options
from tests.conftest import ROOT, V1
from tracepage.errors import RunError
from tracepage.views.numerical_accuracy import TensorError, render_accuracy
from version1_pytorch_baseline import tiny_llama_v1
from version1_pytorch_baseline.tiny_llama_v1 import swiglu
from version2_pytorch_fused import tiny_llama_v2

import pytest
import torch
import torch.nn.functional as F
from torch import nn

V2 = ROOT / "version2_pytorch_fused"
SCRIPT, BASELINE, FUSED = (
    V2 / "validate_numerical_accuracy.py",
    V1 / "tiny_llama_v1.py",
    V2 / "tiny_llama_v2.py",
)
COMMAND = (SCRIPT, "--baseline", BASELINE, "--optimized", FUSED)


def altered(**functions: Callable) -> ModuleType:
    """Version 1 with functions of its module replaced."""
    version = version_files.load(BASELINE)
    for name, function in functions.items():
        assert hasattr(version, name)
        setattr(version, name, function)
    return version


def compare(config: Path, optimized: ModuleType, *flags: str) -> list[TensorError]:
    return accuracy.compare(tiny_llama_v1, optimized, study_options.resolved(config, *flags), [])


def test_the_worst_is_named_beyond_the_tolerance_it_exits_1_and_hands_flags_on(execute, config):
    said = execute(*COMMAND, "--tolerance", "1e-4", "--config", config).out
    lines, verdict = said.splitlines(), " ".join(said[said.index("PASS: ") :].split())
    header = next(i for i, line in enumerate(lines) if line.startswith("tensor "))
    assert lines[header + 1].split("  ")[0] in verdict
    # each weight of Version 1 once
    assert len([line for line in lines if line.startswith("gradient of ")]) == 2 * 9 + 2

    arguments = (*COMMAND, "--config", config, "--tolerance", "0")
    execute(*arguments, "--disable-all-fusion")  # bit for bit
    assert "FAIL: " in execute(*arguments, check=1).out


@pytest.mark.parametrize(
    "flags, least, most", [((), 1e-8, 1e-5), (("--use-amp",), 1e-4, 0.2)], ids=["fp32", "bf16"]
)
def test_errors_are_sorted_and_those_against_float64_are_a_yardstick(config, flags, least, most):
    found, chosen = compare(config, tiny_llama_v2, *flags), study_options.resolved(config, *flags)
    errors = [tensor.error for tensor in found]
    report, passed = render_accuracy(found, "bf16" if flags else "fp32", float("nan"))
    assert errors == sorted(errors, reverse=True) and not passed
    assert f"baseline in {'bf16' if flags else 'fp32'} against float64" in report.terminal()
    expected = {tensor.name: tensor.rounding for tensor in found}
    assert {"logits", "loss", "gradient of layers.1.self_attn.k_proj.weight"} <= expected.keys()
    assert least < max(expected.values()) < most and errors[0] < 100 * max(expected.values())
    assert (
        accuracy.errors_against_float64(
            tiny_llama_v1, tiny_llama_v2, chosen, ["--disable-all-fusion"]
        )
        == expected
    )
    fused = accuracy.errors_against_float64(tiny_llama_v1, tiny_llama_v2, chosen, [])
    assert (
        fused.keys() == expected.keys()
        and fused != expected
        and max(fused.values()) < 10 * max(expected.values())
    )


def test_the_gradients_together_are_one_vector():
    expected = {
        "logits": torch.ones(2),
        "gradient of a": torch.tensor([3.0, 0.0]),
        "gradient of b": torch.tensor([[4.0]]),
    }
    got = expected | {"logits": torch.zeros(2), "gradient of b": torch.tensor([[3.0]])}
    errors = accuracy.errors(expected, got)
    assert errors[accuracy.TOGETHER] == pytest.approx(1 / 5)
    assert errors["gradient of a"] == 0 and errors["gradient of b"] == 0.25
    got["gradient of a"] = torch.full((2,), float("nan"))
    assert accuracy.together(expected, got) == float("inf")


def sees_one_token_more(q, k, v):
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(diagonal=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~future, enable_gqa=True)


MISTAKES = {
    "the future is seen": (dict(attention=sees_one_token_more), "logits"),
    "weights of norms forgotten": (
        dict(rms_norm=lambda x, weight, eps: rms_norm(x, weight / weight, eps)),
        "logits",
    ),
    "queries not rotated": (
        dict(apply_rope=lambda q, k, cos, sin: (q, apply_rope(q, k, cos, sin)[1])),
        "gradient of layers.0.self_attn.q_proj.weight",
    ),
    "gate without gradient": (
        dict(swiglu=lambda gate, up: swiglu(gate.detach(), up) + 0 * gate),
        "gradient of layers.0.mlp.gate_proj.weight",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(config, mistake):
    functions, tensor = MISTAKES[mistake]
    errors = {found.name: found.error for found in compare(config, altered(**functions))}
    assert errors[tensor] > 1e-2


def test_results_that_are_no_numbers_fail(config):
    errors = compare(config, altered(swiglu=lambda gate, up: swiglu(gate, up) * float("nan")))
    assert errors[0].error == float("inf") and not render_accuracy(errors, "fp32", 1e9)[1]


def changed(change: Callable[[nn.Module], object]) -> ModuleType:
    """Version 1 with a change to each model that it makes."""

    def make_model(settings):
        model = tiny_llama_v1.make_model(settings)
        change(model)
        return model

    return altered(make_model=make_model)


def freezes(model: nn.Module) -> None:
    model.layers[1].mlp.down_proj.requires_grad_(False)


def returns_others(model: nn.Module) -> None:
    model.baseline_state_dict = lambda: {
        name: weight + 1 for name, weight in model.state_dict().items()
    }


def has_other_names(model: nn.Module) -> None:
    attention = model.layers[0].self_attn
    attention.out_proj = attention.o_proj
    del attention.o_proj


@pytest.mark.parametrize(
    "change, message",
    [
        (freezes, "layers.1.mlp.down_proj.weight gets no gradient"),
        (returns_others, "do not come back"),
        (has_other_names, "do not load: missing .*out_proj"),
    ],
)
def test_a_weight_without_gradient_or_that_does_not_come_back_is_an_error(config, change, message):
    with pytest.raises(RunError, match=message):
        compare(config, changed(change))
