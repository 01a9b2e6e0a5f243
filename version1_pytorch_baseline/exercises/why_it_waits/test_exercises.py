"""Your parts give the same results, and the GPU does not wait for them."""

import sys
import zlib
from pathlib import Path

import exercise_tools as exercises

import torch
from torch import nn

parts = exercises.load(Path(__file__).parent, "parts")
TEXT = "to be or not to be "


def test_letters_are_read_before_the_steps(monkeypatch):
    samples = parts.Samples(TEXT, 8)
    assert len(samples) == 2
    monkeypatch.delattr(torch, "tensor")
    assert bytes(samples[1].tolist()).decode() == TEXT[8:16]


def test_features_are_pinned_where_there_is_a_gpu(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: pinned.append(options))
    parts.host_tensor(2, 3)
    assert pinned == [{"pin_memory": True}]


def test_norms_stay_on_the_device(monkeypatch):
    gradients = [torch.ones(4), torch.ones(9)]
    monkeypatch.setattr(torch.Tensor, "item", None)
    assert parts.gradient_norms(gradients).tolist() == [2.0, 3.0]


def test_memory_stays_with_the_allocator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(torch.cuda, "empty_cache")
    parts.tidy_memory()


def test_checksum_is_that_of_zlib_without_a_loop_in_python():
    lines = []

    def count(frame, event, argument):
        lines.append(event)
        return count

    batch = torch.arange(64).view(2, 32)
    sys.settrace(count)
    checksum = parts.checksum(batch)
    sys.settrace(None)
    assert checksum == zlib.crc32(batch.numpy().tobytes())
    assert len(lines) < 64


def test_weights_are_saved_every_1000_steps(tmp_path):
    for step in range(2000):
        parts.save(nn.Linear(1, 1), step, Path(tmp_path, str(step)))
    assert {path.name for path in tmp_path.iterdir()} == {"999", "1999"}
