"""Event files of a profile, as TensorBoard reads them."""

from common.analysis.profiles import chrome_trace
from common.analysis.reports import tensorboard
from common.records import step_profile
from tests.small_traces import write_profile

import pytest


def test_tokens_per_second_are_those_of_all_processes(cpu_trace, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_profile(tmp_path / "profile_1.json", cpu_trace, training__world_size=4)
    profile = step_profile.read(tmp_path / "profile_1.json")
    events = EventAccumulator(str(tensorboard.write(tmp_path / "run", profile, chrome_trace.load(cpu_trace))))
    events.Reload()
    training, milliseconds = profile["run"]["training"], profile["run"]["step_ms"]["all"]
    tokens = 4 * training["batch_size"] * training["sequence_length"]
    assert [event.value for event in events.Scalars("train/tokens_per_second")] == pytest.approx(
        [tokens / ms * 1e3 for ms in milliseconds]
    )
