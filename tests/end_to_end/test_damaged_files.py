"""A file that is cut off, empty or of another program is refused in one line that names it, by the
reader of each schema.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import config
from common.training import flop_counters
from tests import records
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES, STATS, write_database
from tests.small_traces import gpu_trace
from tracepage.errors import UsageError
from tracepage.files import read, write_json
from tracepage.readers import chrome_trace, load_kernels
from tracepage.records import run_record, step_profile
from tracepage.records.study_files import Predictions
from tracepage.views import benchmark_suite, flop_counts, fusion_ablation, kernel_benchmark

import pytest

RESULTS = ROOT / "results"


class Valid(NamedTuple):
    """A file by the name of its schema. `read` reads what `write` wrote to this path."""

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]


def of(content: dict) -> Callable[[Path], object]:
    return lambda path: write_json(path, content)


def copied(source: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copyfile(source, path)


def write_flops(path: Path) -> None:
    shutil.move(
        flop_counters.write(
            path.parent, {"DeepSpeed": {"forward": 10, "backward": 20}}, records.record()
        )[0],
        path,
    )


GUESS = {
    "profile": "p",
    "profiled": "2026",
    "change": "flash-attention",
    "expected": 1.3,
    "bound": 1.5,
}
GUESSES = {"schema": "tiny-llama-predictions/1", "predictions": [GUESS]}
VALID = [
    Valid("metrics.json", of(records.record()), run_record.read_timed),
    Valid(
        "profile_1.json",
        of(records.profile(records.record(), [{"name": "aten::mm"}])),
        step_profile.read,
    ),
    Valid("flops_profile.json", write_flops, flop_counts.read_counts),
    Valid("trace_1.json", lambda path: path.write_text(json.dumps(gpu_trace())), chrome_trace.load),
    Valid("a_kernel_trace.csv", copied(FIXTURES / "new_kernel_trace.csv"), load_kernels.load),
    Valid("a_kernel_stats.csv", lambda path: path.write_text(STATS), load_kernels.load),
    Valid("a_results.db", write_database, load_kernels.load),
    Valid("pmc_perf.csv", copied(FIXTURES / "pmc_perf_long.csv"), load_kernels.load),
    Valid("ncu_details.csv", copied(FIXTURES / "ncu_details.csv"), load_kernels.load),
    Valid(
        "fusion_ablation.json",
        copied(RESULTS / "h100/v2_ablation_tiny_fp32.json"),
        fusion_ablation.render_ablation,
    ),
    Valid(
        "benchmark.json",
        copied(RESULTS / "cpu/benchmark_tiny_fp32.json"),
        benchmark_suite.render_benchmark,
    ),
    Valid(
        "metrics_kernels.json",
        copied(RESULTS / "h100/kernels_loss.json"),
        kernel_benchmark.render_kernel_benchmark,
    ),
    Valid("predictions.json", of(GUESSES), lambda path: read(path, Predictions)),
    Valid(
        "config.yaml",
        lambda path: path.write_text("model: {hidden_size: 64}"),
        lambda path: config.resolve(file=path),
    ),
]
FOREIGN = {
    ".json": b'{"schema": "another"}',
    ".csv": b"name,value\na,1\n",
    ".db": b"SQLite format 3\0",
    ".yaml": b"other: {a: 1}",
}


@pytest.mark.parametrize("valid", VALID, ids=lambda valid: valid.name)
def test_a_file_that_is_cut_off_empty_or_foreign_is_refused_in_one_line(
    tmp_path: Path, valid: Valid
):
    path = tmp_path / valid.name
    valid.write(path)
    valid.read(path)
    damaged = {"foreign": FOREIGN[path.suffix]}
    if path.suffix != ".yaml":  # an empty configuration leaves all to the preset
        damaged["empty"] = b""
    if path.suffix != ".csv":  # of which a part may be whole
        damaged["cut off"] = path.read_bytes()[: path.stat().st_size // 2]
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(UsageError) as error:
            valid.read(path)
        assert path.name in str(error.value) and "\n" not in str(error.value), name
