"""Tables of Version 4's comparisons."""

import json

from common.documents import version4
from common.errors import UsageError
from tests.conftest import cells
from tests.records import record, scaling

import pytest


def summary(median: float) -> dict[str, float]:
    return {"median": median, "p20": median, "p80": median, "count": 3}


def write(path, schema: str, rows: list[dict], **more) -> None:
    head = {key: value for key, value in record().items() if key != "model"}
    path.write_text(json.dumps(head | {"schema": schema, "rows": rows} | more))


def test_ways_to_do_a_lever_stand_in_rows_and_presets_in_columns(tmp_path):
    times = {
        ("tiny", "rope", "epilogue"): 4.5,
        ("tiny", "rope", "library"): 5.5,
        ("small", "rope", "epilogue"): 6.5,
        ("", "update", "beside"): 20.0,
    }
    rows = [{"preset": preset, "lever": lever, "way": way, "us": summary(us)} for (preset, lever, way), us in times.items()]
    write(tmp_path / "levers.json", "tiny-llama-levers/1", rows)
    assert cells(version4.levers(tmp_path / "levers.json")) == [
        ["lever", "way", "tiny, us", "small, us", "own sizes, us"],
        ["rope", "epilogue", "4.5", "6.5", ""],
        ["rope", "library", "5.5", "", ""],
        ["update", "beside", "", "", "20"],
    ]


def test_a_block_in_one_kernel_stands_beside_its_layers(tmp_path):
    rows = [{"batch_size": 8, "single_ms": summary(0.1), "layered_ms": summary(0.025), "difference": 0.01}]
    gpu = record()["device"] | {"multiprocessors": 132}
    write(tmp_path / "block.json", "tiny-llama-block-fusion/1", rows, device=gpu, sequence_length=128)
    assert cells(version4.block_fusion(tmp_path / "block.json"))[1] == ["8", "0.0606", "100", "25", "0.25"]


def test_clock_and_power_are_those_of_training_on_each_gpu(tmp_path):
    steps = [1.0] * 12 + [5.0] * 50 + [3.0] * 100
    times = summary(5.0) | {"all": steps, "profiled": 0}
    (tmp_path / "alone_1.json").write_text(json.dumps(record() | {"step_ms": times}))
    (tmp_path / "job.json").write_text(json.dumps(record()))
    idle = ["0.0,0,0,70,0,345,0", "0.0,1,0,70,0,345,0"]
    busy = ["1.0,0,100,690,0,1600,0", "1.0,1,100,650,0,1500,0", "2.0,0,100,680,0,1650,0", "2.0,1,100,700,0,1400,0"]
    head = "seconds,gpu,utilization_percent,power_w,memory_mib,clock_mhz,memory_clock_mhz"
    (tmp_path / "alone.csv").write_text("\n".join([head, *(line for line in idle + busy if ",1," in line[:6])]))
    (tmp_path / "job.csv").write_text("\n".join([head, *idle, *busy]))
    alone, first, second = cells(version4.clocks(tmp_path))[1:]
    assert alone == ["alone", "1", "1", "3", "3", "1,450", "675"]
    assert [first[:2], first[-2:], second[:2], second[-2:]] == [["job", "0"], ["1,625", "685"], ["job", "1"], ["1,450", "675"]]


def test_clocks_need_samples(tmp_path):
    with pytest.raises(UsageError, match="no .csv file"):
        version4.clocks(tmp_path)


def test_another_file_is_refused(tmp_path):
    write(tmp_path / "levers.json", "tiny-llama-benchmark/1", [])
    with pytest.raises(UsageError, match="levers.json"):
        version4.levers(tmp_path / "levers.json")


def test_the_efficiency_on_several_gpus_is_that_of_weak_scaling(tmp_path):
    path = tmp_path / "scaling_large_bf16.json"
    path.write_text(json.dumps(scaling()))
    picture = version4.scaling_efficiency(tmp_path)
    assert picture.numbers == {"large, bf16": {"v1, ddp": {1: 100.0, 2: 80.0}}}
    assert "large, bf16: v1, ddp 80% on 2" in picture.description and "efficiency, %" in picture.drawn()
    with pytest.raises(UsageError, match="measure with results/measure_scaling.sh"):
        version4.scaling_efficiency(tmp_path / "none")
