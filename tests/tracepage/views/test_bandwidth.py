"""Memory traffic: bytes from counters or from shapes, against the measured bandwidth; what cannot
say it is refused.
"""

import csv
import math
import re
import shutil
from pathlib import Path

from tests import records
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES
from tests.small_traces import CEILINGS
from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.files import read_json
from tracepage.views import bandwidth
from tracepage.views.roofline import Point

import pytest

SCRIPT = ROOT / "version2_pytorch_fused/memory_bandwidth_analyzer.py"
H100 = ROOT / "results/h100/v1_tiny_profile.json.gz"

# One kernel: reads of 32, 64 and 128 bytes, writes of 32 and 64 bytes.
READS, WRITES = {32: 10, 64: 20, 128: 5}, {32: 7, 64: 3}
MOVED = sum(size * count for size, count in [*READS.items(), *WRITES.items()])
WRITTEN = {"WRREQ_sum": sum(WRITES.values()), "WRREQ_64B_sum": WRITES[64]}
REQUESTS = {"RDREQ_sum": sum(READS.values()), "RDREQ_32B_sum": READS[32]} | WRITTEN
BY_SIZE = {f"RDREQ_{size}B_sum": count for size, count in READS.items()} | WRITTEN
DEVICES = {
    "gfx942": {f"TCC_EA0_{name}": count for name, count in REQUESTS.items()}
    | {"TCC_BUBBLE_sum": READS[128]},
    "gfx950": {f"TCC_EA0_{name}": count for name, count in (REQUESTS | BY_SIZE).items()}
    | {"TCC_BUBBLE_sum": 99},
    "gfx90a": {f"TCC_EA_{name}": count for name, count in REQUESTS.items()},
}


def write_pmc(folder: Path, counters: dict[str, float]) -> Path:
    """pmc_perf.csv with two launches of a kernel, of 2 and 3 us."""
    values = ",".join(map(str, counters.values()))
    header = f"Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp,{','.join(counters)}"
    path = folder / "pmc_perf.csv"
    path.write_text(
        "\n".join([header, f"0,4,k,1000,3000,{values}", f"1,4,k,9000,12000,{values}"]) + "\n"
    )
    return path


def table(traffic: bandwidth.Traffic) -> list[dict]:
    return [dict(zip(bandwidth.HEADER, row, strict=True)) for row in bandwidth.table(traffic)]


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_requests_times_their_size_and_a_missing_counter_is_named(tmp_path, device):
    traffic = bandwidth.load_traffic(write_pmc(tmp_path, DEVICES[device]))
    # there all that are not small have 64 bytes
    expected = MOVED if device != "gfx90a" else MOVED - 64 * READS[128]
    assert traffic.bytes_are == bandwidth.MEASURED
    assert traffic.rows == [Point("k", None, 2 * expected, pytest.approx(5e-6), calls=2)]
    counter = next(name for name in DEVICES[device] if "WRREQ_64B" in name)
    left = {name: count for name, count in DEVICES[device].items() if name != counter}
    with pytest.raises(UsageError, match=rf"lacks {counter} \({device}\)"):
        bandwidth.load_traffic(write_pmc(tmp_path, left))


def test_ncu_counts_memory_and_l2_and_launches_without_a_count_are_named():
    traffic = bandwidth.load_traffic(FIXTURES / "ncu_raw.csv")  # its third launch has n/a
    assert [(row.calls, row.bytes) for row in traffic.rows if row.name == "gemm_kernel"] == [
        (1, 1024.5e6)
    ]
    assert "left out, 1 of 3 launches: their bytes were not counted" in traffic.notes
    assert table(traffic)[0]["GB/s"] == pytest.approx(1024.5 / 1.5)


def test_counted_flops_and_bytes_stand_under_the_measured_roof(execute, tmp_path):
    """mixbench on an MI200: each work-item reads 8 float64 numbers, and does 16 n + 8 FLOPs."""
    execute(SCRIPT, "--profile-data", FIXTURES / "amd", "--output-dir", "out")
    with (tmp_path / "out/points.csv").open() as file:
        points = {re.search(r"\d+(?=u>)|fill", row["name"])[0]: row for row in csv.DictReader(file)}
    assert float(points.pop("fill")["GFLOP"]) == 0 and len(points) == 7
    for n, row in points.items():
        assert float(row["GFLOP"]) == pytest.approx(4194304 * (16 * int(n) + 8) / 1e9)
        assert float(row["MB"]) == pytest.approx(4194304 * 64 / 1e6, rel=1e-3)
        assert (
            row["side"] == ("compute" if int(n) >= 64 else "memory")
            and 85 < float(row["% of bound"]) < 108
        )


def test_bytes_of_a_gpu_step_by_its_shapes():
    traffic, profile = bandwidth.load_traffic(H100), read_json(H100)
    assert traffic.bytes_are == bandwidth.MINIMUM
    moved = sum(row.bytes * row.calls for row in operators.rows(profile) if row.bytes)
    assert sum(row.bytes for row in traffic.rows) == pytest.approx(moved)
    seconds = sum(row.seconds for row in traffic.rows)
    share = 100 * moved / profile["run"]["ceilings"]["bytes_per_second"] / seconds
    assert dict(bandwidth.facts(traffic))["at least"].endswith(f"{share:.3g} % of that time")
    times = [(row.us, row.bytes is None) for row in operators.rows(profile)]
    share = 100 * sum(us for us, unknown in times if unknown) / sum(us for us, _ in times)
    assert any(note.startswith(f"left out, {share:.1f} %") for note in traffic.notes)


def test_what_is_left_out_is_a_share_of_the_operators_that_are_no_collectives():
    product = {"input_shapes": "[[2, 2], [2, 2]]", "input_types": '["float", "float"]'}
    times = {"aten::mm": 100.0, "my_kernel": 300.0, "gloo:all_reduce": 400.0}
    operators = [product | {"name": name, "self_cpu_us": us} for name, us in times.items()]
    rows, notes = bandwidth.from_profile(records.profile(records.record(), operators))
    assert [row.name for row in rows] == ["aten::mm (attention)"]
    assert notes[0].startswith("left out, 75.0 % of the operators' time: ")
    assert notes[1] == "left out: collectives, 400 us a step"


def test_a_launch_that_took_no_time_has_no_rate(tmp_path):
    path = write_pmc(tmp_path, DEVICES["gfx942"])
    path.write_text(path.read_text().replace("9000,12000", "9000,9000"))
    traffic = bandwidth.load_traffic(path)
    assert traffic.rows == [Point("k", None, MOVED, pytest.approx(2e-6), calls=1)]
    assert "left out, 1 of 2 launches: their bytes were not counted" in traffic.notes


def test_counters_come_before_shapes_and_the_profile_gives_the_ceilings(
    tmp_path,
):
    shutil.copy(H100, tmp_path / "profile_1.json")
    path = write_pmc(tmp_path, DEVICES["gfx942"])
    traffic = bandwidth.load_traffic(tmp_path)
    assert traffic.bytes_are == bandwidth.MEASURED and traffic.path == path
    assert (
        traffic.ceilings["bytes_per_second"]
        == read_json(H100)["run"]["ceilings"]["bytes_per_second"]
    )
    write_pmc(tmp_path, {"TCC_EA0_RDREQ_sum": 1})
    traffic = bandwidth.load_traffic(tmp_path)
    assert traffic.bytes_are == bandwidth.MINIMUM and traffic.path == tmp_path / "profile_1.json"
    assert any("lacks TCC_" in note for note in traffic.notes)


def test_without_a_measured_bandwidth_there_are_no_percentages(tmp_path):
    path = write_pmc(tmp_path, DEVICES["gfx942"])
    said = bandwidth.write_bandwidth(path, tmp_path / "out", draw_roofline=False)
    assert "not measured, so no percentages" in said and "%" not in said.split("longest")[1]
    with pytest.raises(UsageError, match="--generate-roofline-plot needs for FLOPs"):
        bandwidth.write_bandwidth(path, tmp_path / "more", draw_roofline=True)
    assert not (tmp_path / "more").exists()


def test_rows_of_three_kernels_with_known_bounds():
    """At 0.2 GB/s and 1 GFLOP/s: the first is bound by its FLOPs, the second by its bytes, at 95 %
    of the bandwidth.
    """
    rows = [
        Point("slow", 2e9, 1e8, 4.0),
        Point("fast", 1e8, 1.9e8, 1.0),
        Point("not counted", None, 1e8, 4.0),
    ]
    traffic = bandwidth.Traffic(rows, bandwidth.MEASURED, Path("p"), CEILINGS, "a copy", [], None)
    cells = table(traffic)
    assert [cell["bound by"] for cell in cells] == ["compute", "memory", None]
    assert [cell["us above bound"] for cell in cells] == pytest.approx([2e6, 0.05e6, 3.5e6])
    assert [cell["% of copy"] for cell in cells] == pytest.approx([12.5, 95, 12.5])
    bytes_alone = traffic._replace(ceilings=CEILINGS | {"flops_per_second": math.inf})
    assert [cell["bound by"] for cell in table(bytes_alone)] == [None] * 3
    found = dict(bandwidth.facts(traffic))
    assert found["total"] == "390 MB in 9 s of kernels, all that was recorded"
    assert found["at least"] == "1.95 s at that bandwidth, 21.7 % of that time"


def test_the_bandwidth_that_a_step_needs():
    """8 TFLOP that move 3.6 GB: 2,222 FLOP/byte; the GEMM's 1 TFLOP/s then needs 0.45 GB/s."""
    ceilings = CEILINGS | {"flops_per_second": 1e12, "bytes_per_second": 1e12}
    said = dict(bandwidth.demand(8e12, 3.6e9, 12e-3, ceilings))
    assert said["bytes a step"].startswith("at least 3,600 MB") and said["needed"].startswith(
        "0.45 GB/s"
    )
    assert (
        said["intensity"]
        == "2,222 FLOP/byte of these operators; ridge point 1, so FLOPs bind before bytes"
    )
