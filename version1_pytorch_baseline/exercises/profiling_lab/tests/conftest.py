"""Selects the `profiling.py` that the tests import: yours in src/, or with PROFILING_LAB=solution
the one in solution/.
"""

import os
import sys

import pytest
import torch
from lab import FOLDERS

WHICH = os.environ.get("PROFILING_LAB", "starter")
if WHICH not in FOLDERS:
    raise pytest.UsageError(
        f"PROFILING_LAB is {WHICH!r}: set it to solution, or leave it unset for src/profiling.py"
    )
sys.path.insert(0, str(FOLDERS[WHICH]))


def pytest_report_header() -> str:
    return f"profiling lab: {WHICH} ({FOLDERS[WHICH].name}/profiling.py)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same random numbers whichever tests ran before it."""
    torch.manual_seed(0)
