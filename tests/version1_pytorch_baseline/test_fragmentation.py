"""The exercise's model of the caching allocator follows its rules, and on a GPU PyTorch itself."""

import os
import re
import subprocess
import sys

from tests.conftest import PATHS, V1
from version1_pytorch_baseline.exercises import fragmentation

import pytest

SCRIPT = V1 / "exercises" / "fragmentation.py"


@pytest.mark.parametrize(("mib", "reserved"), [(0.0001, 2), (1, 2), (1.5, 20), (9.9, 20), (10, 10), (15, 16)], ids=str)
def test_a_first_tensor_reserves_a_segment_of_its_size_class(mib, reserved):
    assert list(fragmentation.modelled([("allocate", "a", mib)]))[0][1] == reserved


def test_a_freed_block_is_kept_and_taken_again_and_given_back():
    story = fragmentation.STORIES["reuse"]
    assert list(fragmentation.modelled(story)) == [(64, 64), (0, 64), (40, 64), (0, 64), (0, 0)]


def test_small_tensors_stay_out_of_large_segments():
    assert [held for _, held in fragmentation.modelled([("allocate", "a", 1.5), ("allocate", "b", 0.5)])] == [20, 22]


def test_holes_hold_enough_memory_but_not_in_one_piece():
    *_, before, asked, emptied = fragmentation.modelled(fragmentation.STORIES["holes"])
    assert before == (64, 128) and asked == (128, 192) and emptied == asked


def test_free_neighbours_join():
    halves = [("allocate", "b", 32), ("allocate", "c", 32), ("free", "b", 0), ("free", "c", 0)]
    story = [("allocate", "a", 64), ("free", "a", 0), *halves, ("allocate", "d", 64)]
    assert list(fragmentation.modelled(story))[-1] == (64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("story", fragmentation.STORIES)
def test_pytorch_reserves_what_the_model_says(story):
    """In a process of its own, where no other tensors are."""
    command = [sys.executable, SCRIPT, "--story", story]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, text=True, check=True)
    rows = [line.split()[-4:] for line in done.stdout.splitlines()[2:] if line]
    assert len(rows) == len(fragmentation.STORIES[story]) and all(row[:2] == row[2:] for row in rows)


def test_the_script_prints_a_row_for_each_action(execute):
    printed = execute(SCRIPT, "--story", "reuse").out
    assert re.search(r"^allocate +b +40 +40 +64$", printed, re.MULTILINE) and "PyTorch" not in printed
