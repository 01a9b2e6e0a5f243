"""`--memory-snapshot`: what the allocator's history becomes."""

from pathlib import Path

from common import ROOT, memory_snapshot
from common.training import run
from tests.conftest import TINY, V1, run_options
from tracepage.errors import UsageError
from version1_pytorch_baseline import tiny_llama_v1

import pytest


def event(action: str, address: int, size: int, *frames: str) -> dict:
    named = [{"filename": name, "line": 7, "name": "swiglu"} for name in frames]
    return {"action": action, "addr": address, "size": size, "frames": named}


def test_a_release_has_the_block_of_its_allocation():
    ours = str(ROOT / "version2_pytorch_fused/tiny_llama_v2.py")
    trace = [
        event("segment_alloc", 0, 2048),
        event("alloc", 100, 512, "/site-packages/torch/nn.py", str(ROOT / "common/spans.py"), ours),
        event("alloc", 200, 256),
        event("free_requested", 100, 512),
        event("free_completed", 100, 512),
        event("free_requested", 900, 128),
        event("alloc", 100, 64, ours),
    ]
    blocks = [{"state": "active_allocated", "requested_size": size} for size in (256, 64, 1000)]
    segments = [{"device": 0, "blocks": [*blocks, {"state": "inactive", "requested_size": 512}]}]
    found = memory_snapshot.events({"device_traces": [trace], "segments": segments}, 0)
    assert found["places"] == ["tiny_llama_v2.py:7 swiglu", "backward"]
    assert found["events"] == [[0, 512, 0], [1, 256, 1], [0, -512, 0], [3, 64, 0]]
    assert found["before_bytes"] == 1000


def test_a_cpu_is_refused(refused):
    said = refused(
        V1 / "tiny_llama_v1.py", *TINY, "--device", "cpu", "--memory-snapshot", "memory.pickle"
    )
    assert "--memory-snapshot needs a GPU" in said


@pytest.mark.parametrize("name", ["", ".", "/", "text"])
def test_a_name_that_is_none_or_that_of_an_input_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("[]")
    options = run_options(tiny_llama_v1, "--memory-snapshot", name, "--data", "text.json")
    with pytest.raises(UsageError, match="--memory-snapshot: .*(is a folder|is an input)"):
        run.check_outputs(options, Path("metrics.json"))
