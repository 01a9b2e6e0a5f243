"""The choice of tiles: the candidates, their ranking, and the distance of the table to the fastest measured tile."""

import copy
import itertools
import sys

from common.config import ModelConfig
from common.files import read_json
from tests.conftest import ROOT, runs_kernels

import pytest
import torch

pytest.importorskip("triton")
from version3_triton import tune_blocks
from version3_triton.kernels import costs, launch_sizes
from version3_triton.kernels.launch_sizes import LaunchConfig, TileConfig

SCRIPT = ROOT / "version3_triton/tune_blocks.py"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_the_kernel_of_keys_is_long_where_the_others_are_short():
    """It owns keys and goes over queries."""
    keys, queries = (tune_blocks.candidates(name, torch.bfloat16) for name in ("keys", "queries"))
    assert {(one.n, one.m, one.warps, one.stages) for one in keys} == {(one.m, one.n, one.warps, one.stages) for one in queries}
    assert queries == tune_blocks.candidates("forward", torch.bfloat16) and all(one.m >= 64 for one in queries)


@pytest.mark.parametrize("family", ["sm_75", "sm_80", "sm_90", "hip"])
@pytest.mark.parametrize("kernel", tune_blocks.SUBJECTS)
def test_a_kernel_gets_the_tile_of_the_table(monkeypatch, kernel, family):
    monkeypatch.setattr(launch_sizes, "family", lambda: family)
    for dtype, size in itertools.product(DTYPES, tune_blocks.SUBJECTS[kernel].sizes or (16, 64, 80, 128)):
        table, key = tune_blocks.table_of(kernel, size, dtype)
        other = LaunchConfig(512, 8, programs=77) if kernel in launch_sizes.LAUNCH else TileConfig(16, 256, 2, 7)
        with monkeypatch.context() as patch:
            patch.setitem(table, key, other)
            if kernel in launch_sizes.LAUNCH:
                assert launch_sizes.tile(kernel, size, torch.device("cpu")).programs == 77
            else:
                assert launch_sizes.attention_blocks(kernel, size, dtype) is other


def test_every_kernel_is_timed_in_one_choice():
    timed = [function for subject in tune_blocks.SUBJECTS.values() for function in subject.functions]
    assert sorted(timed) == sorted({function for function, _ in costs.training_step(ModelConfig(), 1, 4, 4)})


def times(kernel: str, size: int, *us: float | None) -> list[dict]:
    """Rows of candidates [0], [1], ... with these times."""
    return [{"kernel": kernel, "size": size, "candidate": [i], "us": one} for i, one in enumerate(us)]


def test_the_three_best_tiles_and_that_of_the_table_are_ranked_and_shown_once():
    found = tune_blocks.ranked(times("keys", 64, 30.0, 10.0, None, 20.0, 15.0, 40.0), in_table=[5])
    assert [(one["candidate"], one["relative"]) for one in found] == [([1], 1), ([4], 1.5), ([3], 2), ([5], 4)]
    assert [one["in_table"] for one in found] == [False, False, False, True]
    assert all((one["kernel"], one["size"]) == ("keys", 64) for one in found)

    found = tune_blocks.ranked(times("keys", 64, 30.0, 10.0, 20.0, 15.0), in_table=[3])
    assert [one["candidate"] for one in found] == [[1], [3], [2]] and [one["in_table"] for one in found] == [False, True, False]


def test_one_choice_for_several_sizes_is_the_best_on_average():
    """Each size counts the same, however long it takes; a tile that does not fit at one size is no choice for all."""
    rows = times("swiglu", 1408, 10.0, 11.0, 20.0, 5.0) + times("swiglu", 4096, 2000.0, 1000.0, 1100.0, None)
    found = tune_blocks.ranked(rows, in_table=[0])
    assert [one["candidate"] for one in found] == [[1], [0], [2]] and {one["size"] for one in found} == {None}
    assert [one["relative"] for one in found] == pytest.approx([(11 / 5 + 1) / 2, (10 / 5 + 2) / 2, (20 / 5 + 1.1) / 2])


def test_without_a_gpu_no_tiles_are_chosen_and_an_unknown_kernel_is_refused(refused, tmp_path):
    assert "there is none" in refused(SCRIPT)
    assert not list(tmp_path.iterdir())

    said = refused(SCRIPT, "--kernels", "swiglu", "rms_norm")
    assert "argument --kernels" in said and "'rms_norm'" in said and "norm_backward" in said


@pytest.mark.gpu
def test_tiles_are_chosen_by_time_and_the_table_stays_as_it_is(monkeypatch, tmp_path, capsys):
    before = copy.deepcopy((launch_sizes.LAUNCH, launch_sizes.ATTENTION))
    monkeypatch.chdir(tmp_path)
    flags = ("--kernels", "swiglu", "--seq-len", "128", "--batch-size", "1", "--processes", "4")
    monkeypatch.setattr(sys, "argv", ["tune_blocks.py", *flags])
    tune_blocks.main()
    assert before == (launch_sizes.LAUNCH, launch_sizes.ATTENTION)
    measured = read_json(tmp_path / "tiles.json", tune_blocks.SCHEMA)
    sizes, candidates = tune_blocks.SUBJECTS["swiglu"].sizes, tune_blocks.candidates("swiglu", torch.bfloat16)
    assert len(measured["rows"]) == len(sizes) * len(candidates)
    assert all(one["us"] > 0 for one in measured["rows"])
    table, key = tune_blocks.table_of("swiglu", 4096, torch.bfloat16)
    [now] = [one for one in measured["chosen"] if one["in_table"]]
    assert now["candidate"] == tune_blocks.numbers(table[key]) and 1 <= measured["chosen"][0]["relative"] <= now["relative"]
    assert capsys.readouterr().out.count("*") == 1


def test_the_tiles_for_hopper_are_near_the_fastest_that_was_measured():
    measured = read_json(ROOT / "results/h100/tiles.json", tune_blocks.SCHEMA)
    times: dict[tuple[str, int], dict[tuple[int, ...], float]] = {}
    for row in measured["rows"]:
        if row["us"]:
            times.setdefault((row["kernel"], row["size"]), {})[tuple(row["candidate"])] = row["us"]
    chosen = {
        (kernel, size): launch_sizes.LAUNCH[kernel]["sm_90"]
        for kernel in launch_sizes.LAUNCH
        for size in tune_blocks.SUBJECTS[kernel].sizes
    }
    for size in (64, 128):
        chosen |= {(kernel, size): tile for kernel, tile in launch_sizes.ATTENTION["sm_90", 2][size].items()}
    relative = {case: times[case][tuple(tune_blocks.numbers(tile))] / min(times[case].values()) for case, tile in chosen.items()}
    assert relative.pop(("keys", 64)) < 1.2  # every faster tile spills registers
    assert max(relative.values()) < 1.05, relative


@runs_kernels
@pytest.mark.parametrize("kernel, size, shapes", [
    ("keys", 16, [(1, 2, 8, 16)] * 3), ("norm_backward", 32, [(1, 8, 32), (1, 8, 32), (32,)]), ("swiglu", 24, [(1, 8, 24)] * 2),
    ("rope", 4, [(1, 2, 8, 8)] * 2), ("cross_entropy", 50, [(1, 8, 16), (50, 16)]),
], ids=["keys", "norm_backward", "swiglu", "rope", "cross_entropy"])  # fmt: skip
def test_the_timed_step_computes_all_gradients_at_the_size(kernel, size, shapes):
    gradients = tune_blocks.step_of(kernel, size, torch.float32, batch=1, heads=2, length=8)()
    assert [tuple(gradient.shape) for gradient in gradients] == shapes
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.gpu
def test_a_tile_that_does_not_fit_is_reported():
    before = copy.deepcopy(launch_sizes.ATTENTION)
    fits = tune_blocks.table_of("forward", 128, torch.bfloat16)[0]["forward"]
    for candidate, expected in ((TileConfig(64, 256, 8, 4), False), (fits, True)):
        assert tune_blocks.compile_one("forward", 128, torch.bfloat16, candidate, 2) is expected
        assert before == launch_sizes.ATTENTION
