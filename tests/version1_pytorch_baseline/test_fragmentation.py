"""The exercise on varying lengths: the lengths, the rows of its file, and what it says without a
GPU.
"""

import json

from tests.conftest import V1, without_gpu
from version1_pytorch_baseline.exercises import fragmentation

import pytest
import torch

SCRIPT = V1 / "exercises/fragmentation.py"


def test_all_kinds_have_as_many_steps_and_the_same_longest():
    kinds = fragmentation.lengths_of_steps(300, seed=0)
    assert {len(lengths) for lengths in kinds.values()} == {fragmentation.STEPS}
    assert {max(lengths) for lengths in kinds.values()} == {300}

    one, varying, sorted_once, rounded = kinds.values()
    assert len(set(varying)) > len(set(rounded)) > len(set(one)) == 1 and sorted_once[0] == 300
    assert all(above >= length for above, length in zip(rounded, varying, strict=True))


@without_gpu
def test_without_a_gpu_there_is_no_pool(refused):
    assert "it needs a GPU" in refused(SCRIPT)


@pytest.mark.gpu
def test_the_pool_holds_what_is_allocated_and_all_kinds_allocate_as_much(run_script, tmp_path):
    run_script(SCRIPT, "--preset", "small", "--seq-len", "256", OMP_NUM_THREADS="1")
    pools = json.loads((tmp_path / "fragmentation.json").read_text())["pools"]
    assert all(row["free_mib"] >= 0 for row in pools)
    assert [row["peak_mib"] for row in pools] == pytest.approx([pools[0]["peak_mib"]] * 4, rel=0.02)


def test_the_rows_have_what_the_allocator_counted(tmp_path, monkeypatch, capsys):
    counted = {"peak_mib": 60.0, "kind": "GPU allocator", "reserved_mib": 80.0}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fragmentation.py", "--batch-size", "1", "--seq-len", "16"])
    monkeypatch.setattr(fragmentation, "STEPS", 2)
    monkeypatch.setattr(fragmentation.devices, "is_gpu", lambda device: device.type == "cpu")
    monkeypatch.setattr(fragmentation.devices, "select", lambda name: torch.device("cpu"))
    monkeypatch.setattr(fragmentation.devices, "configure", lambda device, seed: None)
    monkeypatch.setattr(fragmentation.devices, "describe", lambda device: {"name": "a GPU"})
    monkeypatch.setattr(fragmentation.devices, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(fragmentation.devices, "peak_memory", lambda device: counted)
    fragmentation.main()
    pools = json.loads((tmp_path / "fragmentation.json").read_text())["pools"]
    assert len(pools) == 4
    assert all((row["free_mib"], row["free_percent"]) == (20, 25) for row in pools)
    assert "rounded up to 64s" in capsys.readouterr().out
