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


STORY = fragmentation.STORIES
NEIGHBOURS = [("allocate", "b", 32), ("allocate", "c", 32), ("free", "b", 0), ("free", "c", 0)]


@pytest.mark.parametrize("story, last", [
    pytest.param(STORY["reuse"], [(64, 64), (0, 64), (40, 64), (0, 64), (0, 0)], id="a freed block is taken again"),
    pytest.param([("allocate", "a", 1.5), ("allocate", "b", 0.5)], [(1.5, 20), (2, 22)], id="small tensors stay apart"),
    pytest.param(STORY["holes"], [(64, 128), (128, 192), (128, 192)], id="holes are not one piece"),
    pytest.param(
        [("allocate", "a", 64), ("free", "a", 0), *NEIGHBOURS, ("allocate", "d", 64)], [(64, 64)], id="free neighbours join"
    ),
])  # fmt: skip
def test_the_last_rows_of_a_story(story, last):
    assert list(fragmentation.modelled(story))[-len(last) :] == last


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
