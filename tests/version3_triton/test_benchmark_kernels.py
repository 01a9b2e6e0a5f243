"""Version 3's tools: the benchmark of the kernels, its tables and figure, the choice of tiles, Liger-Kernel, recorded work."""

import copy
import dataclasses
import itertools
import json
import statistics
import sys
from argparse import Namespace
from dataclasses import astuple
from pathlib import Path

from tests.conftest import ROOT, TINY, cells, runs_kernels

import pytest
import torch

V3 = ROOT / "version3_triton"

pytest.importorskip("triton")
from common import cli
from common import device as devices
from common.analysis.reports import kernel_benchmark
from common.config import ModelConfig
from common.errors import UsageError
from common.files import read_json
from common.precision import Precision
from common.training import run
from version3_triton import (
    benchmark_kernels,
    kernels,
    liger,
    tiny_llama_v3,
    tune_blocks,
)
from version3_triton.kernels import blocks, costs, flash_attention, linear_cross_entropy, rms_norm, rope, swiglu  # noqa: F401 (interpreted)
from version3_triton.kernels.blocks import Blocks, Spread

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = ModelConfig(
    vocab_size=61, hidden_size=64, num_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
)


# ------------------------------------------------------------------------------------------------ benchmark: what it times


@pytest.fixture
def one_round(monkeypatch, tmp_path) -> Path:
    """The benchmark times every pass once; the folder that it runs in."""
    monkeypatch.setattr(benchmark_kernels, "ROUNDS", 1)
    monkeypatch.setattr(benchmark_kernels, "ITERATIONS", 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*flags: str) -> Namespace:
    return cli.parse(run.parser(tiny_llama_v3).parse_args([*TINY, *flags]))


@runs_kernels
def test_the_benchmark_times_kernels_and_pytorch_at_the_models_shapes(one_round, capsys):
    benchmark_kernels.of_version(tiny_llama_v3, options("--disable-triton-attention", "--disable-triton-loss"))
    measured = read_json(one_round / "metrics_kernels.json", kernel_benchmark.SCHEMA)
    timed = [(row["operation"], row["contender"]) for row in measured["rows"]]
    assert timed == [(name, who) for name in ("rms_norm", "add_rms_norm", "apply_rope", "swiglu") for who in ("kernel", "eager")]
    for row in measured["rows"]:
        assert row["hidden_size"] == 32 and row["host_ms"]["median"] > 0 and row["host_ms"]["count"] == 1
        if DEVICE.type == "cuda":
            assert row["gpu_ms"]["median"] > 0 and row["peak_mib"] > 0
        else:
            assert row["gpu_ms"] is None and row["peak_mib"] is None
    amounts = {row["operation"]: row["amount"] for row in measured["rows"]}  # B 2, S 16, D 32, F 64, fp32
    assert amounts == {"rms_norm": 20480, "add_rms_norm": 32768, "apply_rope": 32768, "swiglu": 65536}
    printed = capsys.readouterr()
    assert "swiglu" in printed.out and "kernel" in printed.out
    assert DEVICE.type == "cuda" or "interpreted: their times say nothing about a GPU" in printed.err
    assert [path.name for path in one_round.iterdir()] == ["metrics_kernels.json"]  # no sweep, no figure


def test_without_a_gpu_the_benchmark_times_pytorch_alone(run_script, tmp_path):
    done = run_script(V3 / "tiny_llama_v3.py", *TINY, "--mode", "benchmark", "--metrics-out", "out.json")
    assert "PyTorch's operations are timed alone" in done.stderr and done.stderr.count("\n") == 1
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["operation"] for row in rows] == list(benchmark_kernels.OPERATIONS)
    assert {row["contender"] for row in rows} == {"eager"}
    product = 2 * 32 * 2 * 16 * 17 // 2
    assert [row["amount"] for row in rows if row["unit"] == "TFLOP/s"] == [7 * product, 3 * 2 * 2 * 16 * 32 * 1000]


def test_a_sweep_times_every_shape_and_draws_them(one_round, monkeypatch, capsys):
    flags = ("--operations", "swiglu", "--sizes", "64x4", "128x2", "--batch-size", "1", "--metrics-out", "sweep.json")
    monkeypatch.setattr(sys, "argv", ["benchmark_kernels.py", *flags])
    benchmark_kernels.main()
    rows = read_json(one_round / "sweep.json", kernel_benchmark.SCHEMA)["rows"]
    shapes = [(row["hidden_size"], row["sequence_length"]) for row in rows if row["contender"] == "eager"]
    assert shapes == [(64, 4), (128, 2)]
    assert (one_round / "sweep.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "sweep.json" in printed and "sweep.png" in printed


def test_a_sweep_keeps_the_head_dimension_and_the_ratios():
    base = ModelConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=2048)
    wide = benchmark_kernels.scaled(base, 4096)
    assert (wide.hidden_size, wide.head_dim, wide.intermediate_size) == (4096, 64, 16384)
    assert (wide.num_attention_heads, wide.num_key_value_heads) == (64, 32)
    with pytest.raises(UsageError, match="in steps of 128, not 192"):
        benchmark_kernels.scaled(base, 192)


def test_a_benchmark_of_nothing_or_into_its_own_figure_is_refused(one_round):
    off = [f"--disable-triton-{name}" for name in kernels.SWITCHES]
    with pytest.raises(UsageError, match="every operation is switched off"):
        benchmark_kernels.of_version(tiny_llama_v3, options(*off))
    with pytest.raises(UsageError, match=r"the figure goes to x\.png"):
        benchmark_kernels.run(options("--metrics-out", "x.png"), sizes=[(64, 4)])
    assert not list(one_round.iterdir())


@pytest.mark.skipif(not kernels.INTERPRETED, reason="is about the interpreter")
def test_the_interpreter_is_not_trusted_with_bfloat16():
    for flags in (("--use-amp",), ("--use-amp", "--amp-dtype", "bfloat16")):
        with pytest.raises(UsageError, match="computes bfloat16 wrong"):
            tiny_llama_v3.make_model(options(*flags, "--device", "cpu"))
        with pytest.raises(UsageError, match="computes bfloat16 wrong"):
            benchmark_kernels.run(options(*flags, "--device", "cpu"))
    tiny_llama_v3.make_model(options("--use-amp", "--amp-dtype", "float16", "--device", "cpu"))


def test_flops_are_the_kernels_where_the_kernel_runs_and_nowhere_else():
    ids = torch.zeros(2, 16, dtype=torch.long)
    counted = {}
    for name, attention in (("kernel", flash_attention.attention), ("reference", kernels.REFERENCE.attention), ("other", max)):
        operations = dataclasses.replace(kernels.REFERENCE, attention=attention)
        counted[name] = tiny_llama_v3.TinyLlama(SMALL, operations).kernel_flops(ids)
    product = 2 * 32 * 16 * SMALL.hidden_size * SMALL.num_layers
    nothing = {"forward": 0, "backward": 0}
    assert counted == {"kernel": {"forward": 2 * product, "backward": 7 * product}, "reference": nothing, "other": nothing}


@pytest.mark.parametrize("value", ["512", "0x16"])
def test_a_size_that_is_none(monkeypatch, capsys, value):
    monkeypatch.setattr(sys, "argv", ["benchmark_kernels.py", "--sizes", value])
    with pytest.raises(SystemExit, match="2"):
        benchmark_kernels.main()
    error = capsys.readouterr().err
    assert "argument --sizes" in error and error.count("\n") == 1


def test_parts_of_a_fused_product_are_separated():
    fused = torch.randn(2, 5, 3 * 8)
    part = fused.split(8, dim=-1)[1].requires_grad_()
    rows = benchmark_kernels.separated(part)
    assert not part.is_contiguous() and rows.is_contiguous() and torch.equal(rows, part)
    heads = part.detach().unflatten(-1, (2, 4)).transpose(1, 2)  # [B, heads, S, Dh]
    product = benchmark_kernels.separated(heads)
    assert product.shape == (2, 2, 5, 4) and torch.equal(product, heads)
    assert product.transpose(1, 2).is_contiguous()  # [B, S, heads, Dh] in memory
    assert all(x.is_leaf and x.requires_grad for x in (rows, product))


# ----------------------------------------------------------------------------------------------- benchmark: what it shows


def row(operation: str, contender: str, host: float, gpu: float | None, amount: float = 1e9, **shape: int) -> dict:
    """A row of a measurement, at B 4, S 128 and D 512 if `shape` says nothing else; milliseconds."""
    unit = "TFLOP/s" if operation in ("attention", "linear_cross_entropy") else "GB/s"
    size = {"batch_size": 4, "sequence_length": 128, "hidden_size": 512} | shape
    figures = {"host_ms": {"median": host}, "gpu_ms": gpu and {"median": gpu}, "peak_mib": 10 * host}
    return {"operation": operation, **size, "unit": unit, "amount": amount, "contender": contender, **figures}


def measurement(rows: list[dict]) -> dict:
    """On a device that copies 2 TB/s and computes 500 TFLOP/s."""
    return {
        "schema": kernel_benchmark.SCHEMA, "device": {"name": "a GPU"}, "precision": {"compute": "bf16"},
        "ceilings": {"bytes_per_second": 2e12, "flops_per_second": 5e14}, "rows": rows,
    }  # fmt: skip


ON_A_GPU = [
    row("rms_norm", "kernel", host=2.0, gpu=1.0), row("rms_norm", "eager", host=5.0, gpu=4.0),
    row("linear_cross_entropy", "kernel", host=3.0, gpu=2.0, amount=4e11),
    row("linear_cross_entropy", "eager", host=9.0, gpu=8.0, amount=4e11),
    row("linear_cross_entropy", "liger", host=4.0, gpu=None, amount=4e11),
]  # fmt: skip


def test_contenders_are_held_against_each_other_by_one_clock():
    _, _, kernel, eager, liger = ON_A_GPU
    assert kernel_benchmark.ratio(eager, kernel) == 8 / 2
    assert kernel_benchmark.ratio(liger, kernel) == 4 / 3  # by the host: liger was not recorded


def test_share_is_of_the_ceiling_that_the_unit_has():
    measured = measurement(ON_A_GPU)
    shares = [kernel_benchmark.share(one, measured) for one in ON_A_GPU]
    assert shares == pytest.approx([50, 12.5, 40, 10, 20])  # 1 GB in 1 ms of 2 TB/s; 0.4 TFLOP in 2 ms of 500 TFLOP/s


def test_the_printed_table():
    title, header, *body = kernel_benchmark.text(measurement(ON_A_GPU)).splitlines()
    assert "bf16" in title and "a GPU" in title
    assert header.split()[-2:] == ["it", "MiB"] and "host ms  GPU ms" in header
    kernel, eager, loss, slower, peer = (line.split() for line in body)
    # operation, B x S, D, contender, host, GPU, rate, share, eager / it, MiB
    assert kernel == ["rms_norm", "4", "x", "128", "512", "kernel", "2", "1", "1,000", "50", "4", "20"]
    assert eager[5:] == ["eager", "5", "4", "250", "12.5", "1", "50"]
    assert loss[5:] == ["kernel", "3", "2", "200", "40", "4", "30"] and slower[5:8] == ["eager", "9", "8"]
    assert peer[5:] == ["liger", "4", "100", "20", "2.25", "40"] and body[4].index("liger") == body[3].index("eager")
    start = header.index("GPU ms")
    assert body[4][start : start + len("GPU ms")].isspace()  # nothing could be recorded


def test_columns_that_nothing_fills_are_left_out():
    rows = [row("swiglu", who, host=1.0, gpu=None) | {"peak_mib": None} for who in ("kernel", "eager")]
    header = kernel_benchmark.text(measurement(rows)).splitlines()[1]
    assert "GB/s" in header and not any(name in header for name in ("GPU ms", "TFLOP/s", "MiB"))


def test_a_figure_has_a_panel_for_each_operation_and_hidden_size_and_a_line_for_each_contender():
    rows = [
        row(operation, who, host=1.0, gpu=1.0 if who == "kernel" else 2.0, amount=amount * length, hidden_size=hidden,
            sequence_length=length)
        for operation, amount, peers in (("swiglu", 1e6, ("kernel", "eager", "liger")), ("attention", 1e9, ("kernel", "cudnn")))
        for hidden in (1024, 512)
        for length in (512, 128)
        for who in peers
    ]  # fmt: skip
    drawing = kernel_benchmark.figure(measurement(rows))
    assert [axis.get_title() for axis in drawing.axes] == ["D = 512", "D = 1024", "", ""]
    assert [drawing.axes[i].get_ylabel() for i in (0, 2)] == ["swiglu\n% of copy", "attention\n% of matrix product"]
    drawn = [{line.get_label(): line for line in axis.get_legend_handles_labels()[0]} for axis in drawing.axes]
    assert [sorted(lines) for lines in drawn] == [["eager", "kernel", "liger"]] * 2 + [["cudnn", "kernel"]] * 2
    for lines, ceiling, amount in ((drawn[1], 2e12, 1e6), (drawn[2], 5e14, 1e9)):
        assert list(lines["kernel"].get_xdata()) == [128, 512]  # in order, whatever the rows' order
        assert list(lines["kernel"].get_ydata()) == pytest.approx([100 * amount * n / 1e-3 / ceiling for n in (128, 512)])
    assert list(drawn[0]["eager"].get_ydata()) == pytest.approx([y / 2 for y in drawn[0]["kernel"].get_ydata()])
    [legend] = drawing.legends
    colours = [{name: line.get_color() for name, line in lines.items()} for lines in drawn]
    assert sorted(text.get_text() for text in legend.get_texts()) == ["cudnn", "eager", "kernel", "liger"]
    assert len(set((colours[0] | colours[2]).values())) == 4 and colours[0]["kernel"] == colours[2]["kernel"]


def test_the_documents_table_has_a_row_for_each_shape_with_the_peers_beside_the_kernel(tmp_path):
    attention = [row("attention", "kernel", 2.0, 1.0, amount=1e11), row("attention", "eager", 2.0, 1.5, amount=1e11),
                 row("attention", "cudnn", 2.0, 0.5, amount=1e11)]  # fmt: skip
    for name, rows in (("a.json", ON_A_GPU), ("b.json", attention)):
        (tmp_path / name).write_text(json.dumps(measurement(rows)))
    header, norm, loss, heads = cells(kernel_benchmark.documented(tmp_path / "a.json", tmp_path / "b.json"))
    assert "compiled / kernel" not in header  # nobody timed it
    norm, loss, heads = (dict(zip(header, line, strict=True)) for line in (norm, loss, heads))
    assert norm["operation"] == "rms_norm" and norm["kernel"] == "1,000 GB/s" and norm["% of ceiling"] == "50"
    assert norm["eager / kernel"] == "4" and norm["liger / kernel"] == "" and norm["kernel's MiB"] == "20"
    assert loss["kernel"] == "200 TFLOP/s" and loss["eager / kernel"] == "4" and loss["eager's MiB"] == "90"
    assert loss["liger / kernel"] == "1.33"
    assert heads["cudnn / kernel"] == "0.5" and heads["eager / kernel"] == "1.5"


# ------------------------------------------------------------------------------------------------------------------ tiles


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("kernel", tune_blocks.FUNCTIONS)
def test_candidates_differ_and_tile_in_powers_of_two(kernel):
    for dtype in DTYPES:
        found = tune_blocks.candidates(kernel, dtype)
        assert len(found) > 4 and len(set(found)) == len(found)
        for one in found:
            assert isinstance(one, Spread if kernel in blocks.SPREAD else Blocks)
            sizes = (one.numbers, one.per_thread) if isinstance(one, Spread) else (one.m, one.n, one.warps)
            assert all(size.bit_count() == 1 for size in sizes) and (isinstance(one, Spread) or min(one.m, one.n) >= 16)


def test_the_kernel_of_keys_is_long_where_the_others_are_short():
    """It owns keys and goes over queries."""
    keys, queries = (tune_blocks.candidates(name, torch.bfloat16) for name in ("keys", "queries"))
    assert {(one.n, one.m, one.warps, one.stages) for one in keys} == {(one.m, one.n, one.warps, one.stages) for one in queries}
    assert queries == tune_blocks.candidates("forward", torch.bfloat16) and all(one.m >= 64 for one in queries)


@pytest.mark.parametrize("family", ["sm_80", "sm_90", "hip"])
@pytest.mark.parametrize("kernel", tune_blocks.FUNCTIONS)
def test_what_is_put_into_the_table_is_what_a_kernel_gets(monkeypatch, kernel, family):
    monkeypatch.setattr(blocks, "family", lambda: family)
    for dtype, size in itertools.product(DTYPES, tune_blocks.SIZES.get(kernel, (16, 64, 80, 128))):
        table, key = tune_blocks.table_of(kernel, size, dtype)
        other = Spread(512, 8, programs=77) if kernel in blocks.SPREAD else Blocks(16, 256, 2, 7)
        with monkeypatch.context() as patch:
            patch.setitem(table, key, other)
            if kernel in blocks.SPREAD:
                assert blocks.tile(kernel, size, torch.device("cpu")).programs == 77
            else:
                assert blocks.attention_blocks(kernel, size, dtype) is other


def test_every_kernel_is_timed_in_one_choice():
    timed = [function for functions in tune_blocks.FUNCTIONS.values() for function in functions]
    assert sorted(timed) == sorted({function for function, _ in costs.training_step(SMALL, 1, 4, 4)})
    modules = (flash_attention, linear_cross_entropy, rms_norm, rope, swiglu)
    assert all(any(hasattr(module, function) for module in modules) for function in timed)


def times(kernel: str, size: int, *us: float | None) -> list[dict]:
    """Rows of candidates [0], [1], ... with these times."""
    return [{"kernel": kernel, "size": size, "candidate": [i], "us": one} for i, one in enumerate(us)]


def test_the_three_best_and_the_tables_are_ranked():
    found = tune_blocks.ranked(times("keys", 64, 30.0, 10.0, None, 20.0, 15.0, 40.0), in_table=[5])
    assert [(one["candidate"], one["relative"]) for one in found] == [([1], 1), ([4], 1.5), ([3], 2), ([5], 4)]
    assert [one["in_table"] for one in found] == [False, False, False, True]
    assert all((one["kernel"], one["size"]) == ("keys", 64) for one in found)


def test_the_tables_among_the_best_is_shown_once():
    found = tune_blocks.ranked(times("keys", 64, 30.0, 10.0, 20.0, 15.0), in_table=[3])
    assert [one["candidate"] for one in found] == [[1], [3], [2]] and [one["in_table"] for one in found] == [False, True, False]


def test_one_choice_for_several_sizes_is_the_best_on_average():
    """Each size counts the same, however long it takes; what does not fit at one size is no choice for all."""
    rows = times("swiglu", 1408, 10.0, 11.0, 20.0, 5.0) + times("swiglu", 4096, 2000.0, 1000.0, 1100.0, None)
    found = tune_blocks.ranked(rows, in_table=[0])
    assert [one["candidate"] for one in found] == [[1], [0], [2]] and {one["size"] for one in found} == {None}
    assert [one["relative"] for one in found] == pytest.approx([(11 / 5 + 1) / 2, (10 / 5 + 2) / 2, (20 / 5 + 1.1) / 2])


def test_without_a_gpu_no_tiles_are_chosen(run_script, tmp_path):
    done = run_script(V3 / "tune_blocks.py", check=2)
    assert done.stderr == "error: tiles are chosen by their time on a GPU, and there is none\n" and not done.stdout
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_is_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune_blocks.py", "--kernels", "swiglu", "rms_norm"])
    with pytest.raises(SystemExit, match="2"):
        tune_blocks.main()
    error = capsys.readouterr().err
    assert "argument --kernels" in error and "'rms_norm'" in error and "norm_backward" in error and error.count("\n") == 1


@pytest.mark.gpu
def test_tiles_are_chosen_by_time_and_the_table_stays_as_it_is(monkeypatch, tmp_path, capsys):
    before = copy.deepcopy((blocks.SPREAD, blocks.ATTENTION))
    monkeypatch.chdir(tmp_path)
    flags = ("--kernels", "swiglu", "--seq-len", "128", "--batch-size", "1", "--processes", "4")
    monkeypatch.setattr(sys, "argv", ["tune_blocks.py", *flags])
    tune_blocks.main()
    assert before == (blocks.SPREAD, blocks.ATTENTION)
    measured = read_json(tmp_path / "tiles.json", tune_blocks.SCHEMA)
    assert len(measured["rows"]) == len(tune_blocks.SIZES["swiglu"]) * len(tune_blocks.candidates("swiglu", torch.bfloat16))
    assert all(one["us"] > 0 for one in measured["rows"])
    table, key = tune_blocks.table_of("swiglu", 4096, torch.bfloat16)
    [now] = [one for one in measured["chosen"] if one["in_table"]]
    assert now["candidate"] == list(astuple(table[key])) and 1 <= measured["chosen"][0]["relative"] <= now["relative"]
    assert capsys.readouterr().out.count("*") == 1


def test_the_tiles_for_hopper_are_near_the_fastest_that_was_measured():
    measured = read_json(ROOT / "results/h100/tiles.json", tune_blocks.SCHEMA)
    times: dict[tuple[str, int], dict[tuple[int, ...], float]] = {}
    for row in measured["rows"]:
        if row["us"]:
            times.setdefault((row["kernel"], row["size"]), {})[tuple(row["candidate"])] = row["us"]
    chosen = {(kernel, size): blocks.SPREAD[kernel]["sm_90"] for kernel in blocks.SPREAD for size in tune_blocks.SIZES[kernel]}
    for size in (64, 128):
        chosen |= {(kernel, size): tile for kernel, tile in blocks.ATTENTION["sm_90", 2][size].items()}
    relative = {case: times[case][astuple(tile)] / min(times[case].values()) for case, tile in chosen.items()}
    assert relative.pop(("keys", 64)) < 1.2  # what is faster spills
    assert max(relative.values()) < 1.05, relative


@runs_kernels
@pytest.mark.parametrize(
    "kernel, size, shapes",
    [
        ("keys", 16, [(1, 2, 8, 16)] * 3),
        ("norm_backward", 32, [(1, 8, 32), (1, 8, 32), (32,)]),
        ("swiglu", 24, [(1, 8, 24)] * 2),
        ("rope", 4, [(1, 2, 8, 8)] * 2),
        ("cross_entropy", 50, [(1, 8, 16), (50, 16)]),
    ],
    ids=["keys", "norm_backward", "swiglu", "rope", "cross_entropy"],
)
def test_what_is_timed_gives_all_gradients_at_the_size(kernel, size, shapes):
    gradients = tune_blocks.step_of(kernel, size, torch.float32, batch=1, heads=2, length=8)()
    assert [tuple(gradient.shape) for gradient in gradients] == shapes
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.gpu
def test_a_tile_that_does_not_fit_is_said_to():
    before = copy.deepcopy(blocks.ATTENTION)
    fits = tune_blocks.table_of("forward", 128, torch.bfloat16)[0]["forward"]
    for candidate, expected in ((Blocks(64, 256, 8, 4), False), (fits, True)):
        assert tune_blocks.compile_one(("forward", 128, torch.bfloat16, candidate, 2)) is expected
        assert before == blocks.ATTENTION


# ------------------------------------------------------------------------------------------------------- Liger-Kernel


def test_contenders_are_those_that_can_run_here():
    on_gpu = DEVICE.type == "cuda"
    backends = ["flash"] * on_gpu + ["cudnn"] * (on_gpu and not torch.version.hip)
    half, single = Precision(DEVICE, torch.bfloat16), Precision(DEVICE, None)
    assert list(benchmark_kernels.contenders("attention", half, peers=True)) == ["kernel", "eager", "compiled", *backends]
    assert list(benchmark_kernels.contenders("attention", single, peers=True)) == ["kernel", "eager", "compiled"]
    assert list(benchmark_kernels.contenders("swiglu", half, peers=False)) == ["kernel", "eager"]


def results(function, work: benchmark_kernels.Case) -> list[torch.Tensor]:
    """Outputs, and gradients of all inputs; what a function overwrites is its own copy."""
    inputs = [benchmark_kernels.separated(x).detach().clone().requires_grad_() for x in work.inputs]
    outputs = function(*inputs, *work.rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    gradients = [torch.randn(output.shape).to(output) for output in outputs]
    kept = [output.detach().clone() for output in outputs]
    return [*kept, *torch.autograd.grad(outputs, inputs, gradients)]


LIGER = [name for name in benchmark_kernels.OPERATIONS if hasattr(liger, name)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(None, 1e-4), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("operation", LIGER)
def test_liger_computes_what_the_reference_does(operation, dtype, tolerance):
    pytest.importorskip("liger_kernel")
    work = benchmark_kernels.case(operation, (SMALL, 2, 33), Precision(DEVICE, dtype))
    expected, got = (results(getattr(functions, operation), work) for functions in (kernels.REFERENCE, liger))
    assert len(got) == len(expected)
    for i, (theirs, right) in enumerate(zip(got, expected, strict=True)):
        assert theirs.shape == right.shape, i
        error = (theirs.double() - right.double()).abs().max()
        assert error <= tolerance * right.double().abs().max(), f"result {i}: {error:.2g}"


@pytest.mark.gpu
def test_ligers_loss_waits_for_the_gpu_and_is_not_recorded(one_round):
    pytest.importorskip("liger_kernel")
    precision = Precision(DEVICE, torch.bfloat16)
    for operation in ("linear_cross_entropy", "swiglu"):
        work = benchmark_kernels.case(operation, (SMALL, 2, 33), precision)
        functions = {name: getattr(owner, operation) for name, owner in (("eager", kernels.REFERENCE), ("liger", liger))}
        timed = benchmark_kernels.time_case(work, functions, DEVICE)
        assert timed["eager"]["gpu_ms"]["median"] > 0 and timed["liger"]["host_ms"]["median"] > 0
        assert (timed["liger"]["gpu_ms"] is None) == (operation == "linear_cross_entropy")


@pytest.mark.gpu
def test_a_small_pass_is_timed_without_its_launch(monkeypatch):
    x = torch.zeros(1, device=DEVICE)
    short, long = (benchmark_kernels.replayed({"add": lambda n=n: [x.add_(1) for _ in range(n)]}, DEVICE)["add"] for n in (1, 10))
    assert 5 < statistics.median(long) / statistics.median(short) < 15
    monkeypatch.setattr(benchmark_kernels, "MOST_PASSES", 1)
    alone = benchmark_kernels.replayed({"add": lambda: x.add_(1)}, DEVICE)["add"]
    assert statistics.median(alone) > 1.5 * statistics.median(short)


# ---------------------------------------------------------------------------------------------------- recorded GPU work


@pytest.mark.gpu
def test_recorded_work_is_done_again_where_it_was():
    total = torch.zeros(3, device=DEVICE)
    replay = devices.record(lambda: total.add_(1))
    before = total.clone()
    replay()
    assert torch.equal(total, before + 1)
    total.fill_(5)  # it reads what is there now
    replay()
    replay()
    assert torch.equal(total, torch.full_like(total, 7))
    devices.record(lambda: total.add_(1), times=4)()
    assert total[0] == 7 + 3 + 4  # and the three of its warm-up
