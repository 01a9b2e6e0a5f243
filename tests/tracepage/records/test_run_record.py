"""Records of runs: all measured ones are valid, and a damaged one is named with its field, in one
line.
"""

import json
import math
from collections.abc import Callable

from tests.conftest import ROOT
from tests.records import record
from tracepage.errors import UsageError
from tracepage.files import read_json
from tracepage.records import run_record

import pytest

RUNS = [
    path
    for path in sorted((ROOT / "results").rglob("*.json"))
    if read_json(path).get("schema") == run_record.SCHEMA
]


@pytest.fixture
def read(tmp_path) -> Callable[..., dict]:
    """read(content): what the reader of records makes of it."""

    def write_and_read(content: object) -> dict:
        (tmp_path / "run.json").write_text(json.dumps(content))
        return run_record.read(tmp_path / "run.json")

    return write_and_read


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_every_measured_run_is_valid(path):
    run = run_record.read(path)
    assert run == read_json(path), "nothing is changed or left out"


def test_runs_without_newer_keys_or_steps_are_valid_and_unknown_keys_are_kept(read, tmp_path):
    old = record(device={"kind": "cpu", "name": "x", "memory_mib": 1}) | {"stage": {"fixed": True}}
    assert "settings" not in old and read(old) == old

    failed = record(
        status="failed: out of memory", loss__all=[], step_ms={"all": [], "profiled": 0}
    )
    for key in ("tokens_per_second", "flops_per_second", "mfu"):
        del failed[key]
    assert run_record.unusable(tmp_path / "failed.json", read(failed)) == [
        "failed.json was not completed (failed: out of memory)"
    ]


@pytest.mark.parametrize(
    ("change", "field", "wrong"),
    [
        ({"training__batch_size": 0}, "training.batch_size", "greater than 0"),
        ({"training__batch_size": "8"}, "training.batch_size", "integer"),
        ({"model__hidden_size": 255}, "model", "not divisible"),
        (
            {"model__num_key_value_heads": None},
            "model.num_key_value_heads",
            "Input should be a valid integer",
        ),
        ({"precision__compute": "int4"}, "precision.compute", "fp32"),
        ({"loss__all": [math.nan]}, "loss.all.0", "finite"),
        ({"loss__all": []}, "loss", "it has no loss, but steps were timed"),
        ({"step_ms__p80": 10.0}, "step_ms", "p20 is above p80"),
        ({"step_ms__count": 19}, "step_ms", "count is 19, but 20 steps count"),
        ({"step_ms__all": [13.0] * 20}, "step_ms", "median is 12, but that of the steps is 13"),
    ],
)
def test_a_wrong_value_is_named(read, tmp_path, change, field, wrong):
    with pytest.raises(UsageError, match=wrong) as error:
        read(record(**change))
    assert str(error.value).startswith(f"{tmp_path}/run.json: {field}: ") and "\n" not in str(
        error.value
    )


@pytest.mark.parametrize(
    "section, key",
    [
        ("data", "sha256"),
        ("data", "entropy_floor"),
        ("environment", "torch"),
        ("flops_per_step", "total"),
    ],
)
def test_a_key_that_a_reader_needs_is_named(read, section, key):
    content = record()
    del content[section][key]
    with pytest.raises(UsageError, match=f"run.json: {section}.{key}: Field required"):
        read(content)


def test_a_missing_key_and_another_schema_are_named(read):
    for key in record().keys() - {"schema"}:
        with pytest.raises(UsageError, match=f"run.json: {key}: Field required"):
            read({other: value for other, value in record().items() if other != key})
    for content in ([], {"schema": "tiny-llama-profile/1"}, {}):
        with pytest.raises(UsageError, match="not a file of schema tiny-llama-run/1"):
            read(content)


def test_runs_differ_by_what_a_step_depends_on_by_processes_and_by_losses():
    ours, theirs = (
        record(loss__all=[7.0, 6.0, 5.0]),
        record(training__batch_size=16, precision__tf32=True, version="v2"),
    )
    theirs["device"] |= {"threads": 2, "multiprocessors": 50}  # of a CPU, and a part of the GPU
    assert run_record.differences(run_record.conditions(ours), run_record.conditions(theirs)) == [
        "batch size (8 and 16)",
        "device threads (None and 2)",
        "device multiprocessors (100 and 50)",
        "precision tf32 (False and True)",
    ]
    assert run_record.conditions(ours) == run_record.conditions(record(step_ms__median=99.0))
    # Runs of older records were deterministic.
    assert run_record.conditions(ours) == run_record.conditions(record(deterministic=True))
    assert run_record.differences(
        run_record.conditions(record(deterministic=False)), run_record.conditions(ours)
    ) == ["deterministic (False and True)"]
    assert run_record.loss_difference(ours, record(loss__all=[7.0, 6.5])) == (0.5, 2), (
        "over the steps that both have"
    )
    # which counts as one process
    alone, old = record(training__world_size=1, training__parallel=None), record()
    together = record(training__world_size=2, training__parallel="ddp")
    assert run_record.differences(run_record.conditions(alone), run_record.conditions(old)) == []
    found = run_record.differences(run_record.conditions(together), run_record.conditions(old))
    assert found == ["processes (2 and 1)", "parallel (ddp and None)"]
