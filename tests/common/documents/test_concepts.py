"""The pictures of CONCEPTS.md, and its table of a GPU's sizes."""

import json
from pathlib import Path

from common.analysis.formulas import flops
from common.config import ModelConfig
from common.documents import concepts
from common.errors import UsageError
from tests import branched_traces
from tests.conftest import texts
from tests.records import peers
from tests.small_traces import gpu_trace

import pytest
import torch

GPU = {
    "name": "A GPU", "numSms": 100, "warpSize": 32, "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 3 * 2**10, "totalGlobalMem": 2**31,
}  # fmt: skip


def trace(path: Path, content: dict, **properties) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"deviceProperties": [GPU | properties]} | content))
    return path


def test_intensities_follow_from_flops_and_bytes():
    found = concepts.intensities(ModelConfig(hidden_size=256, intermediate_size=512), batch_size=8, sequence_length=128)
    tokens, d, f = 1024, 256, 512
    assert found["feed-forward projections"] == pytest.approx(2 * tokens * d * f / (2 * (tokens * d + d * f + tokens * f)))
    assert found["residual addition"] == 1 / (4 + 2 + 4)
    assert found["silu"] == 4 / (2 + 2)
    assert found["scores q k^T"] < found["flash attention"]  # which moves no scores


def test_the_roofline_has_the_rates_of_the_versions_and_no_others(tmp_path):
    peers(tmp_path / "peers_tiny_bf16.json", "NVIDIA H200", v1=20.0, v4=0.5, captured=0.75)
    picture = concepts.roofline(tmp_path)
    work = flops.training_step(ModelConfig(), 8, 128)["total"]
    assert picture.numbers[:2] == [989.0, 4.8]
    assert picture.numbers[3] == {"tiny": {"v1": pytest.approx(work / 20e-3 / 1e12), "v4": pytest.approx(work / 0.5e-3 / 1e12)}}
    assert "memory-bound: residual addition, AdamW, softmax" in picture.description
    assert {"AdamW", "feed-forward projections", "206 FLOP/byte", "v4"} <= texts(picture.drawn())


def test_a_device_without_a_data_sheet_has_no_roofline(tmp_path):
    peers(tmp_path / "peers_tiny_bf16.json", v1=20.0)
    with pytest.raises(UsageError, match="data sheet of A GPU"):
        concepts.roofline(tmp_path)


def test_a_timeline_has_launches_and_the_intervals_of_the_kernels(tmp_path):
    """Times from the first kernel of the profiled steps, which starts at 20 us."""
    picture = concepts.timeline(trace(tmp_path / "traces" / "v1_small.json", gpu_trace()))
    panel = picture.numbers["v1, small"]
    assert panel["launches"] == [13, 34, 38, 65, 92]  # the first one comes before the window
    assert panel["gpu"] == [[0, 35], [40, 35], [80, 30], [111, 59]]
    assert panel["delay_us"] == 6
    assert panel["busy"] == pytest.approx(100 * 159 / (125 + 60), abs=0.1)  # the kernel before ends at 5 us
    assert "A GPU" in picture.description and "v1, small" in " ".join(texts(picture.drawn()))


def test_a_timeline_says_that_a_graph_was_launched_before(tmp_path):
    picture = concepts.timeline(trace(tmp_path / "traces" / "v4_small.json", branched_traces.trace(graph=True)))
    panel = picture.numbers["v4, small"]
    assert panel["launches"] == [] and panel["kernels"] == len(branched_traces.KERNELS)
    assert panel["gpu"] == [[0, 10], [11, 19], [33, 10]]
    assert "no launch" in " ".join(texts(picture.drawn()))


def test_a_trace_without_a_gpu_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(gpu_trace()))
    with pytest.raises(UsageError, match="not a trace of a GPU"):
        concepts.timeline(path)
    cpu = gpu_trace()
    cpu["traceEvents"] = [event for event in cpu["traceEvents"] if event["cat"] in ("cpu_op", "user_annotation")]
    with pytest.raises(UsageError, match="no kernels of a GPU"):
        concepts.timeline(trace(path, cpu))


def test_the_sizes_of_a_gpu_come_from_its_trace(tmp_path):
    table = concepts.chip(trace(tmp_path / "trace.json", gpu_trace()))
    assert "A GPU" in table and "| multiprocessors (SM, CU) | 100 |" in table
    assert "KiB | 3 |" in table and "GiB | 2 |" in table


def test_tiles_are_computed_where_the_mask_keeps_a_score():
    kept = torch.ones(concepts.LENGTH, concepts.LENGTH).tril().unfold(0, concepts.TILE, concepts.TILE)
    sums = kept.unfold(1, concepts.TILE, concepts.TILE).sum(dim=(-1, -2))
    whole, skipped = int((sums == concepts.TILE**2).sum()), int((sums == 0).sum())
    picture = concepts.causal_tiles()
    assert picture.numbers[2] == {"whole": whole, "masked": sums.numel() - whole - skipped, "skipped": skipped}
    assert f"{sums.numel() - skipped} of {sums.numel()} tiles" in " ".join(texts(picture.drawn()))
