"""A trace that several rooms read, and profiles of a CPU and of a GPU."""

import json
from pathlib import Path

from tests.small_traces import gpu_trace, record_cpu_trace, write_profile

import pytest


@pytest.fixture(scope="session")
def cpu_trace(tmp_path_factory) -> Path:
    """trace_1.json of a small Version 1 on the CPU; no test writes beside it."""
    path = tmp_path_factory.mktemp("trace") / "trace_1.json"
    record_cpu_trace(path)
    return path


@pytest.fixture
def cpu_profile(tmp_path, cpu_trace) -> Path:
    """profile_1.json beside its trace."""
    (tmp_path / cpu_trace.name).symlink_to(cpu_trace)
    write_profile(tmp_path / "profile_1.json", cpu_trace)
    return tmp_path / "profile_1.json"


@pytest.fixture
def gpu_profile(tmp_path) -> Path:
    """profile_2.json beside its trace."""
    (tmp_path / "trace_2.json").write_text(json.dumps(gpu_trace()))
    write_profile(
        tmp_path / "profile_2.json", tmp_path / "trace_2.json", device__name="NVIDIA H100 80GB HBM3"
    )
    return tmp_path / "profile_2.json"
