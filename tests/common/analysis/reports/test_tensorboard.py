"""Event files of a profile, as TensorBoard reads them."""

import json

from common.analysis.profiles import chrome_trace
from common.analysis.reports import tensorboard
from common.records import step_profile
from tests.small_traces import write_profile

import pytest


@pytest.mark.parametrize("world_size", [1, 4])
def test_tokens_per_second_are_those_of_all_processes(cpu_trace, tmp_path, world_size):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "profile_1.json"
    write_profile(path, cpu_trace)
    content = json.loads(path.read_text())
    content["run"]["training"]["world_size"] = world_size
    path.write_text(json.dumps(content))
    profile = step_profile.read(path)
    events = EventAccumulator(str(tensorboard.write(tmp_path / "run", profile, chrome_trace.load(cpu_trace))))
    events.Reload()
    training, milliseconds = profile["run"]["training"], profile["run"]["step_ms"]["all"]
    tokens = world_size * training["batch_size"] * training["sequence_length"]
    assert [event.value for event in events.Scalars("train/tokens_per_second")] == pytest.approx(
        [tokens / ms * 1e3 for ms in milliseconds]
    )
