"""The memory of a snapshot, and files that are none."""

import gzip
import os
import pickle

from tests.snapshot_files import (
    FORWARD,
    MIB,
    content,
    entry,
    stack,
    step_content,
    write_snapshot,
)
from tracepage.errors import UsageError
from tracepage.readers import allocator_history

import pytest


@pytest.fixture
def read(tmp_path):
    return lambda snapshot: allocator_history.read(write_snapshot(tmp_path / "a.pickle", snapshot))


def test_changes_add_up_to_what_the_allocator_had(read):
    snapshot = read(step_content())
    allocated = snapshot.events.bytes.cumsum() / MIB
    assert list(allocated) == [10, 50, 50, 70, 30, 35, 15]
    assert list(snapshot.events.reserved.cumsum() / MIB) == [50, 50, *[100] * 5]
    assert snapshot.device == 1 and snapshot.free == [85 * MIB]
    assert list(snapshot.alive.place) == ["before the history", "me/t.py:8 main"]


def test_a_release_has_the_place_of_its_allocation(read):
    events = read(step_content()).events
    assert list(events.place[[1, 3, 4, 5, 6]]) == [
        "models/llama.py:71 forward",
        "no stack",
        "models/llama.py:71 forward",
        "me/t.py:8 main",
        "no stack",
    ]
    assert list(events.category[[1, 3, 5]]) == ["forward", "no stack", "optimizer"]


def test_what_was_allocated_before_can_be_released(read):
    released = entry("free_requested", 9, 30 * MIB)
    events = read(content(released, alive=[(10 * MIB, [])])).events
    assert list(events.bytes / MIB) == [40, -30]
    assert set(events.category) == {"before the history"}


@pytest.mark.parametrize(
    "frames, place, category",
    [
        (stack(("/torch/autograd/graph.py", 1, "_engine_run_backward")), "graph.py:1", "backward"),
        (stack(("??", 0, "torch::autograd::Engine::run()")), "??:0 torch::", "backward"),
        (stack(("/a/data.py", 4, "load"), ("/a/t.py", 5, "main")), "a/data.py:4 load", "other"),
        (stack(("<eval>", 1, "forward"), ("/a/m.py", 2, "call")), "a/m.py:2 call", "forward"),
    ],
)
def test_a_stack_tells_the_users_line_and_the_category(read, frames, place, category):
    row = read(content(entry("alloc", 1, 512, frames), alive=[(512, frames)])).events.iloc[1]
    assert place in row.place and row.category == category


def test_a_file_without_history_says_so(read):
    snapshot = read(content(alive=[(MIB, FORWARD)]))
    assert "_record_memory_history" in snapshot.notes[0] and len(snapshot.events) == 1


def test_requests_that_failed_are_kept(read):
    failed = {"action": "oom", "size": 7 * MIB, "device_free": MIB, "frames": FORWARD}
    assert read(content(failed)).failures == [(7 * MIB, MIB, "models/llama.py:71 forward")]


def test_other_devices_are_told(read):
    both = step_content()
    both["segments"].append({"device": 0, "total_size": MIB, "blocks": []})
    assert read(both).notes == ["Not shown: memory of device 0, which used less."]


def test_a_packed_file_is_read(tmp_path):
    path = tmp_path / "a.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(step_content())))
    assert allocator_history.is_snapshot(path) and allocator_history.read(path).device == 1


class Crafted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_crafted_file_runs_nothing_and_is_refused(tmp_path):
    path = write_snapshot(tmp_path / "a.pickle", {"segments": Crafted(tmp_path / "made")})
    with pytest.raises(UsageError, match=r"a.pickle is no memory snapshot.*names posix.mkdir"):
        allocator_history.read(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused(tmp_path, share):
    whole = pickle.dumps(step_content())
    (tmp_path / "a.pickle").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UsageError, match="a.pickle is no memory snapshot, or is cut off"):
        allocator_history.read(tmp_path / "a.pickle")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([1, 2], "is a pickle, but no memory snapshot"),
        ({"segments": []}, "is a pickle, but no memory snapshot"),
        ({"segments": [], "device_traces": []}, "holds no memory"),
        ({"segments": [{}], "device_traces": []}, r"damaged memory snapshot: KeyError\('device'\)"),
        ({"segments": [], "device_traces": [[{"size": 1}]]}, r"damaged .*KeyError\('action'\)"),
    ],
)
def test_another_pickle_is_refused(read, wrong, message):
    with pytest.raises(UsageError, match=message):
        read(wrong)
