"""Profiles of steps: the newest of a folder, measured ones are valid, and a damaged one is named
with its field, in one line.
"""

import json
import math

from tests.conftest import ROOT
from tests.records import profile, record
from tracepage.errors import UsageError
from tracepage.files import read_json
from tracepage.records import step_profile

import pytest

PROFILES = sorted((ROOT / "results").glob("*/*_profile.json.gz"))


def write(path, **changes):
    path.write_text(json.dumps(profile(record(), [{"name": "aten::mm"}]) | changes))
    return path


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_measured_profile_is_valid(path):
    assert step_profile.read(path) == read_json(path)


OPERATOR = profile(record(), [{"name": "aten::mm"}])["operators"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": record(step_ms={"all": [], "profiled": 0})}, "run.step_ms.median: Field required"),
        (
            {"operators": [OPERATOR, OPERATOR | {"calls": 0}]},
            "operators.1.calls: Input should be greater than 0",
        ),
        ({"operators": [OPERATOR | {"input_shapes": "[[2,"}]}, "input_shapes: Invalid JSON"),
        ({"operators": [OPERATOR | {"input_shapes": "5"}]}, "input_shapes: Input should be"),
        ({"operators": [OPERATOR | {"input_types": "[[]]"}]}, "input_types.0: Input should be"),
        ({"launch": {"count": 1}}, "launch.mean_delay_us: Field required"),
        ({"step_us": []}, "holds no profiled step"),
        ({"kernels": [{"name": "gemm"}]}, "kernels.0.span: Field required"),
        ({"step_us": [math.nan]}, "step_us.0: Input should be a finite number"),
        ({"profiled_steps": 0, "step_us": [], "operators": []}, "holds no profiled step"),
    ],
)
def test_a_damaged_profile_is_named_with_its_field(tmp_path, change, message):
    path = write(tmp_path / "profile_1.json", **change)
    with pytest.raises(UsageError, match=message) as error:
        step_profile.read(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_folder_gives_the_profile_that_sorts_last_or_says_how_to_make_one(tmp_path):
    with pytest.raises(UsageError, match="--enable-pytorch-profiler --profile-dir"):
        step_profile.find(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        step_profile.find(tmp_path / "missing")

    for name in ("profile_20260102T000000_1.json", "profile_20260101T000000_9.json"):
        write(tmp_path / name)
    assert step_profile.find(tmp_path).name == "profile_20260102T000000_1.json"
    assert (
        step_profile.find(tmp_path / "profile_20260101T000000_9.json").name
        == "profile_20260101T000000_9.json"
    )


def test_time_of_spans_is_added_up_by_phase_the_largest_first():
    rows = [
        {"name": "a", "span": "norm", "self_cpu_us": 2000.0},
        {"name": "b", "span": "mlp", "self_cpu_us": 3000.0},
        {"name": "c", "span": "mlp", "self_cpu_us": 1000.0, "phase": "backward"},
    ]
    found = step_profile.span_milliseconds(profile(record(), rows))
    assert list(found.items()) == [
        ("mlp", {"forward": 3.0, "backward": 1.0}),
        ("norm", {"forward": 2.0}),
    ]
