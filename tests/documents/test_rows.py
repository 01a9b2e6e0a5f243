"""Tables of records, sections of reports, and what a profile says of a step."""

from pathlib import Path

from common import ROOT
from documents import rows, sections
from tests import records
from tests.conftest import cells
from tracepage.errors import UsageError
from tracepage.files import write_json

import pytest

H200 = ROOT / "results/h200"


def run(path: Path, **changes: object) -> Path:
    write_json(path, records.record(**changes))
    return path


def test_a_run_has_the_columns_of_its_report_and_of_its_record(tmp_path):
    paths = [
        run(tmp_path / "v1_tiny.json", step_ms__median=12.5),
        run(tmp_path / "v2_tiny.json", version="v2"),
    ]
    columns = [
        "version",
        "preset",
        "ms/step",
        "learning rate = training.learning_rate",
        "floor = data.entropy_floor",
    ]
    conditions, _, table = rows.rows(columns, paths).partition("\n\n")
    header, first, second = cells(table)
    assert conditions == "A GPU; torch 2.13.0; 2026-01-01"
    assert header == ["version", "preset", "ms/step", "learning rate", "floor"]
    assert first == ["v1", "tiny", "12.5", "0.001", ""] and second[0] == "v2"


def test_a_list_in_a_record_has_a_row_each(tmp_path):
    own = {key: records.record()[key] for key in ("date", "device", "environment")}
    write_json(
        tmp_path / "lab.json", own | {"list": [{"us": 2000, "of": {"a": 1}}, {"us": 1, "of": None}]}
    )
    _, *found = cells(
        rows.rows(["device", "ms = us / 1000", "of.a"], [tmp_path / "lab.json"], "list")
    )
    assert found == [["A GPU", "2", "1"], ["A GPU", "0.001", ""]]
    with pytest.raises(KeyError, match="bytes"):
        rows.rows(["bytes"], [tmp_path / "lab.json"], "list")


@pytest.mark.parametrize("device, percent", [("NVIDIA H100 80GB HBM3", "50"), ("A GPU", "")])
def test_decoding_is_held_against_the_bandwidth_of_the_data_sheet(device, percent, tmp_path):
    path = tmp_path / "large_v1.json"
    run = {key: records.record()[key] for key in ("date", "environment")}
    named = {"kind": "cuda", "name": device, "memory_mib": 1.0}
    rate = {"schema": "tiny-llama-decoding/1", "bytes_per_second": 3.35e12 / 2}
    write_json(path, run | rate | {"device": named})
    assert cells(rows.rows(["% of data sheet"], [path])) == [["% of data sheet"], [percent]]


def test_files_come_in_order_of_presets_and_a_pattern_without_files_is_refused():
    assert [rows.preset_of(path) for path in rows.find(["results/h200/v1_*.json"])] == [
        "tiny",
        "small",
        "medium",
    ]
    with pytest.raises(UsageError, match="there is no results/nobody"):
        rows.find(["results/nobody/v1_*.json"])


def test_a_profile_beside_a_run_gives_launches_and_shares_of_its_step(tmp_path):
    """A step of 1 ms under the profiler, with 0.5 ms in four kernels of attention."""
    record = records.record(step_ms__median=2.0)
    write_json(tmp_path / "v1_tiny.json", record)
    operator = {
        "name": "aten::mm",
        "self_device_us": 500.0,
        "input_shapes": "[[2, 2], [2, 2]]",
        "input_types": '["float", "float"]',
    }
    launch = {"count": 4, "mean_delay_us": 1.0}
    profile = records.profile(
        record, [operator], [{"name": "k"}], device_busy_us=500.0, launch=launch
    )
    write_json(tmp_path / "v1_tiny_profile.json.gz", profile)
    columns = ["attention %", "mlp %", "rest %", "launches"]
    assert cells(rows.rows(columns, [tmp_path / "v1_tiny.json"]))[1:] == [["50", "0", "50", "4"]]


def test_the_rest_of_a_cpus_step_is_what_no_span_has(tmp_path):
    """A step of 1 ms under the profiler, with 0.5 ms in attention and 0.2 ms in the loss."""
    record = records.record()
    write_json(tmp_path / "v1_tiny.json", record)
    attention = {"name": "aten::bmm", "self_cpu_us": 500.0}
    loss = {"name": "aten::exp", "self_cpu_us": 200.0, "span": "loss"}
    profile = records.profile(record, [attention, loss])
    write_json(tmp_path / "v1_tiny_profile.json.gz", profile)
    columns = ["attention %", "loss %", "mlp %", "rest %"]
    assert cells(rows.rows(columns, [tmp_path / "v1_tiny.json"]))[1:] == [["50", "20", "0", "30"]]


def test_a_section_has_all_columns_of_its_report_or_those_that_are_named():
    path = H200 / "kernels_loss.json"
    whole, some = (
        sections.section("rates", [path]),
        sections.section("rates", [path], ["D", "kernel"]),
    )
    assert whole.startswith("`results/h200/kernels_loss.json`: NVIDIA H200; torch 2.11")
    assert (
        cells(some)[0] == ["D", "kernel"]
        and [row[2:4] for row in cells(whole)[1:]] == cells(some)[1:]
    )
