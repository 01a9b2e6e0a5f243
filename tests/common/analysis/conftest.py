"""A trace that several rooms read."""

from pathlib import Path

from tests.small_traces import record_cpu_trace

import pytest


@pytest.fixture(scope="session")
def cpu_trace(tmp_path_factory) -> Path:
    """trace_1.json of a small Version 1 on the CPU; no test writes beside it."""
    path = tmp_path_factory.mktemp("trace") / "trace_1.json"
    record_cpu_trace(path)
    return path
