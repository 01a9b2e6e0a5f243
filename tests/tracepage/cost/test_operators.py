"""FLOPs and bytes of ATen operators, and the ceiling that bounds a call."""

from common.config import ModelConfig
from tests import models
from tests.small_traces import BATCH, CEILINGS, CONFIG, LENGTH, write_profile
from tracepage.cost import flops, operators

import pytest

FLOAT, BF16, NUMBER = "float", "c10::BFloat16", "Scalar"
CONFIGS = {"GQA": models.config(), "MHA": models.config(kv_heads=4)}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
HEADS_FIRST = ("_scaled_dot_product_flash_attention_for_cpu", "_cudnn_attention_forward")
SEQUENCE_FIRST = ("_flash_attention_forward", "_efficient_attention_forward")


@pytest.mark.parametrize(
    ("name", "shapes", "types", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], [FLOAT, FLOAT], (60, 4 * (6 + 15 + 10))),
        ("aten::mm", [[2, 3], [3, 5]], [BF16, BF16], (60, 2 * (6 + 15 + 10))),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], [FLOAT, FLOAT], (420, 4 * 7 * (6 + 15 + 10))),
        (
            "aten::addmm",
            [[5], [2, 3], [3, 5], [], []],
            [FLOAT] * 3 + [NUMBER] * 2,
            (60, 4 * (5 + 6 + 15 + 10)),
        ),
        ("aten::mul", [[4, 1, 8], [3, 8]], [FLOAT, FLOAT], (96, 4 * (32 + 24 + 96))),
        ("aten::add", [[4, 8], [], []], [FLOAT, "double", NUMBER], (32, 4 * (32 + 32) + 8)),
        ("aten::add", [[4, 8], [4, 8], []], [FLOAT, BF16, NUMBER], (32, 32 * (4 + 2 + 4))),
        (
            "aten::masked_fill_",
            [[4, 8], [8], []],
            [FLOAT, "bool", NUMBER],
            (32, 4 * 32 + 8 + 4 * 32),
        ),
        ("aten::copy_", [[4, 8], [4, 8], []], [BF16, FLOAT, NUMBER], (0, 32 * (2 + 4))),
        ("aten::sum", [[4, 8], [], [], []], [FLOAT, "ScalarList", NUMBER, ""], (32, 128)),
        ("aten::_softmax", [[4, 8], [], []], [FLOAT, NUMBER, NUMBER], (160, 256)),
        ("aten::cat", [[[4, 8], [4, 2]], []], ["TensorList", NUMBER], (0, 2 * 4 * 40)),
        (
            "aten::index_select",
            [[100, 8], [], [6]],
            [FLOAT, NUMBER, "long int"],
            (0, 2 * 6 * 8 * 4),
        ),
        (
            "aten::gather",
            [[100, 8], [], [6, 8], [], [6, 8]],
            [FLOAT, NUMBER, "long int", NUMBER, FLOAT],
            (0, 2 * 48 * 4),
        ),
        (
            "aten::nll_loss_forward",
            [[6, 100], [6], [], [], []],
            [FLOAT, "long int", "", NUMBER, NUMBER],
            (6, 6 * 12),
        ),
        (
            "aten::embedding_dense_backward",
            [[2, 3, 8], [2, 3], []],
            [FLOAT, "long int", NUMBER],
            (48, 4 * 48 * 2 + 8 * 6),
        ),
        (
            "aten::_foreach_add_",
            [[[4, 8], [8]], [[4, 8], [8]], []],
            ["TensorList", "TensorList", NUMBER],
            (40, 3 * 40 * 4),
        ),
        (
            "aten::_fused_adamw_",
            [*[[[4, 8], [8]]] * 4, [], [[], []], []],
            [*["TensorList"] * 6, NUMBER],
            (14 * 40, 7 * 40 * 4),
        ),
        ("aten::_fused_adamw_", [[]] * 7, [*["TensorList"] * 6, NUMBER], None),
        (
            "aten::_index_put_impl_",
            [[9, 8], [], [2, 3, 8], []],
            [FLOAT, "", FLOAT, NUMBER],
            (48, 4 * 48 * 2),
        ),
        ("aten::view", [[4, 8], []], [FLOAT, "ScalarList"], (0, 0)),
        ("CompiledFunction", [[4, 8]], [FLOAT], None),
        ("aten::some_new_operator", [[4, 8]], [FLOAT], None),
        ("aten::mm", [], [], None),
        ("aten::mm", [[4, 8]], [FLOAT], None),
        ("aten::mm", [[4, 8], [8]], [FLOAT, FLOAT], None),
        ("aten::mm", [[4, 8], [8, 8]], [], None),
        ("aten::add", [[[4], [8]]], [FLOAT], None),
        (
            "aten::_flash_attention_forward",
            [[51, 4, 12]] * 3,
            [FLOAT] * 3,
            None,
        ),  # packed sequences
    ],
)
def test_cost_of_one_call(name, shapes, types, expected):
    assert operators.cost(name, shapes, types) == expected


@pytest.mark.parametrize(
    ("flops_", "moved", "expected"),
    [(8e3, 8, (8e-6, "compute")), (8, 8e3, (4e-5, "memory")), (8, 8, (1e-6, "launch"))],
)
def test_the_largest_of_three_times_binds(flops_, moved, expected):
    seconds, kind = operators.bound(flops_, moved, CEILINGS)
    assert (seconds, kind) == (pytest.approx(expected[0]), expected[1])


def attention_cost(name: str, config: ModelConfig, kind: str = "float") -> tuple[int, int]:
    """Of one layer's call, with the arguments in the order of PyTorch's schema."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k = ([BATCH, count, LENGTH, size] for count in (heads, groups))
    if name.removesuffix("_backward") not in HEADS_FIRST and not name.startswith("_cudnn"):
        q, k = ([BATCH, LENGTH, count, size] for count in (heads, groups))
    statistic = [BATCH, heads, LENGTH]
    tensors = [q, q, k, k, q, statistic] if name.endswith("_backward") else [q, k, k]
    return operators.cost(
        f"aten::{name}", [*tensors, [], []], [*[kind] * len(tensors), "Scalar", ""]
    )


@each_config
@pytest.mark.parametrize("name", [*HEADS_FIRST, *SEQUENCE_FIRST])
def test_fused_attention_needs_the_causal_flops_and_the_bytes_of_one_kernel(name, config):
    counted, moved = attention_cost(name, config)
    assert config.num_layers * counted == flops.forward(config, BATCH, LENGTH)["attention"]
    q, k = (
        count * config.head_dim
        for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    assert moved == 4 * BATCH * LENGTH * (2 * q + 2 * k + config.num_attention_heads)


@each_config
@pytest.mark.parametrize(
    "name", [HEADS_FIRST[0], "_cudnn_attention", "_flash_attention", "_efficient_attention"]
)
def test_its_backward_is_five_products_and_moves_tensors_and_gradients_once(name, config):
    counted, moved = attention_cost(f"{name}_backward", config, "c10::BFloat16")
    assert config.num_layers * counted == 2.5 * flops.forward(config, BATCH, LENGTH)["attention"]
    q = BATCH * LENGTH * config.hidden_size
    k = BATCH * LENGTH * config.num_key_value_heads * config.head_dim
    # the output's gradient, q, k, v and the output; those of q, k and v
    inputs, gradients = (q, q, k, k, q), (q, k, k)
    assert (
        moved
        == 2 * (sum(inputs) + sum(gradients)) + 4 * BATCH * config.num_attention_heads * LENGTH
    )


def test_operators_of_version_1_have_known_costs_and_products_the_formulas(tmp_path, cpu_trace):
    rows = operators.rows(write_profile(tmp_path / "profile_1.json", cpu_trace))
    assert [row.name for row in rows if row.flops is None] == []
    products = sum(row.flops * row.calls for row in rows if row.name in ("aten::mm", "aten::bmm"))
    assert products == pytest.approx(
        flops.training_step(CONFIG, BATCH, LENGTH, causal=False)["total"], rel=1e-12
    )


def test_the_share_of_a_ceiling_is_that_of_all_calls(tmp_path, cpu_trace):
    """In each of three steps two products of 2 ms, at 1 GFLOP/s, take 8 ms together."""
    profile = write_profile(tmp_path / "profile_1.json", cpu_trace)
    product = next(row for row in profile["operators"] if row["name"] == "aten::mm")
    shapes = {"input_shapes": "[[100, 100], [100, 100]]", "calls": 6, "self_cpu_us": 24_000.0}
    [row] = operators.rows(profile | {"operators": [product | shapes]})
    assert (row.calls, row.us, row.bound, row.percent) == (2, 8_000, "compute", 50)
