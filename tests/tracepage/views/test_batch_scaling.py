"""Growth with the batch size: known lines are found again, and unequal runs are refused."""

import csv
import os
from pathlib import Path

from common.config import ModelConfig
from tests.conftest import V1
from tests.records import record, save_profile
from tracepage.cost import flops
from tracepage.views.batch_scaling import render_batch_scaling

import pytest

SIZES = V1 / "analyze_batch_scaling.py"


def run(batch_size: int, ms: float | None = None, **changes) -> dict:
    """A record whose step takes 12 ms + 3 ms a sample and 300 MiB + 25 MiB a sample, if nothing
    else is asked for.
    """
    ms = 12.0 + 3.0 * batch_size if ms is None else ms
    counted = flops.training_step(ModelConfig(), batch_size, 128)
    own = {
        "training__batch_size": batch_size,
        "device": {"kind": "cpu", "name": "a processor", "memory_mib": 8192.0, "threads": 2},
        "memory": {"peak_mib": 300.0 + 25.0 * batch_size, "kind": "process RSS"},
        "flops_per_step": counted,
        "flops_per_second": counted["total"] / ms * 1e3,
        "tokens_per_second": batch_size * 128 / ms * 1e3,
        "step_ms": {
            "all": [ms] * 23,
            "profiled": 3,
            "median": ms,
            "p20": 0.9 * ms,
            "p80": 1.2 * ms,
            "count": 20,
        },
        "ceilings": {
            "flops_per_second": 1e11,
            "bytes_per_second": 1e10,
            "operation_seconds": 1e-6,
            "precision": "fp32",
        },
    }
    return record(**own | changes)


def save_sizes(folder: Path, *batch_sizes: int, **changes) -> list[Path]:
    return [save_profile(folder / f"size{size}", run(size, **changes)) for size in batch_sizes]


def shown(folders: list[Path]) -> str:
    """The terminal text on one line."""
    return " ".join(render_batch_scaling(folders).terminal().split())


def test_a_known_line_is_found_again_and_the_csv_has_its_numbers(execute, tmp_path):
    folders = save_sizes(tmp_path, 16, 4, 32, 8)
    text = shown(folders)
    assert "t(B) = 12 ms + 3 ms x B" in text and "m(B) = 300 MiB + 25 MiB x B" in text
    assert "S / b = 42,667 tokens/s" in text  # 128 / 3 ms
    execute(SIZES, "--profile-dirs", *(folder.name for folder in folders))
    rows = list(csv.DictReader((tmp_path / "batch_scaling/batch_scaling.csv").open()))
    assert [int(row["B"]) for row in rows] == [4, 8, 16, 32]
    assert rows[1].pop("MFU %") == "", "this processor is not listed"
    assert {key: float(value) for key, value in rows[1].items()} == pytest.approx(
        {
            "B": 8,
            "ms/step": 36,
            "p20": 32.4,
            "p80": 43.2,
            "tokens/s": 8 * 128 / 0.036,
            "peak MiB": 500,
            "TFLOP/s": run(8)["flops_per_second"] / 1e12,
            "% of measured GEMM": 100 * run(8)["flops_per_second"] / 1e11,
        }
    )


def test_the_limit_of_throughput_is_that_of_all_processes(tmp_path):
    folders = save_sizes(tmp_path, 4, 8, training__world_size=2)
    assert "S / b = 85,333 tokens/s" in shown(folders)  # 2 x 128 / 3 ms


def test_two_points_leave_no_residual_and_three_do(tmp_path):
    folders = save_sizes(tmp_path, 4, 8)
    assert "A line fits any two points" in shown(folders)
    # 24, 36, 60 ms at 4, 8, 12: the line is 4 + 4.5 B, and the middle point lies 4 ms below it
    three = shown([*folders, save_profile(tmp_path / "off", run(12, ms=60.0))])
    assert (
        "t(B) = 4 ms + 4.5 ms x B" in three
        and "Largest distance of a point from its line: 4 ms" in three
    )
    flat = [save_profile(tmp_path / f"flat{size}", run(size, 50.0)) for size in (4, 8, 16)]
    assert "S / b" not in shown(flat)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["size4", "again"], "give two folders or more, with one profile for each batch size"),
        (
            ["size4", "other"],
            "differ in more than the batch size: version (v1 and v2), sequence length (128 and 64), capture_step",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(refused, tmp_path, folders, message):
    save_sizes(tmp_path, 4, 8, settings={"capture_step": False})
    save_profile(tmp_path / "again", run(4, settings={"capture_step": False}))
    save_profile(
        tmp_path / "other",
        run(8, version="v2", training__sequence_length=64, settings={"capture_step": True}),
    )
    before = sorted(os.listdir(tmp_path))
    assert message in refused(SIZES, "--profile-dirs", *folders)
    assert sorted(os.listdir(tmp_path)) == before
