"""Event files of a profile, as TensorBoard reads them."""

from pathlib import Path
from typing import Any

from common.training import profile_files
from tests.small_traces import record_cpu_trace, write_profile
from tracepage.records import step_profile

import pytest


def load(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tokens_are_of_all_processes_and_a_resumed_run_goes_on_at_its_step(tmp_path):
    trace = tmp_path / "trace_1.json"
    record_cpu_trace(trace)
    write_profile(
        tmp_path / "profile_1.json", trace, training__world_size=4, training__first_step=101
    )
    profile = step_profile.read(tmp_path / "profile_1.json")
    events = load(profile_files.write_events(tmp_path / "run", profile["run"]))
    training, milliseconds = profile["run"]["training"], profile["run"]["step_ms"]["all"]
    tokens = 4 * training["batch_size"] * training["sequence_length"]
    rates = events.Scalars("train/tokens_per_second")
    assert [event.value for event in rates] == pytest.approx(
        [tokens / ms * 1e3 for ms in milliseconds]
    )
    assert [event.step for event in rates] == [101 + i for i in range(len(milliseconds))]
