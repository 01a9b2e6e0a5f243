"""Memory traffic: bytes from counters or from shapes, against the measured bandwidth; what cannot say it is refused."""

import csv
import math
import re
import shutil
from pathlib import Path

from common.analysis.formulas import operators
from common.analysis.reports import bandwidth
from common.errors import UsageError
from common.files import read_json
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES, SAMPLES, needs_samples
from tests.small_traces import CEILINGS, write_profile

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
    "gfx942": {f"TCC_EA0_{name}": count for name, count in REQUESTS.items()} | {"TCC_BUBBLE_sum": READS[128]},
    "gfx950": {f"TCC_EA0_{name}": count for name, count in (REQUESTS | BY_SIZE).items()} | {"TCC_BUBBLE_sum": 99},
    "gfx90a": {f"TCC_EA_{name}": count for name, count in REQUESTS.items()},
}
TRACE_HEADER = "Dispatch_ID,GPU_ID,Kernel_Name,Start_Timestamp,End_Timestamp"


def write_pmc(folder: Path, counters: dict[str, float]) -> Path:
    """pmc_perf.csv with two launches of a kernel, of 2 and 3 us."""
    folder.mkdir(parents=True, exist_ok=True)
    values = ",".join(map(str, counters.values()))
    lines = [f"{TRACE_HEADER},{','.join(counters)}", f"0,4,k,1000,3000,{values}", f"1,4,k,9000,12000,{values}"]
    path = folder / "pmc_perf.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_ncu(path: Path, **columns: tuple[str, list[float]]) -> None:
    """Raw page of ncu: a unit and a value per launch for each metric; every launch is of a kernel of its own, and takes 1 us."""
    metrics = {"gpu__time_duration.sum": ("ns", [1000] * len(next(iter(columns.values()))[1]))} | columns
    lines = [["ID", "Process ID", "Kernel Name", *metrics], ["", "", "", *(unit for unit, _ in metrics.values())]]
    for i in range(len(metrics["gpu__time_duration.sum"][1])):
        lines.append([str(i), "1", f"kernel_{i}", *(str(values[i]) for _, values in metrics.values())])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n")


def table(traffic: bandwidth.Traffic) -> list[dict]:
    return [dict(zip(bandwidth.HEADER, row, strict=True)) for row in bandwidth.table(traffic)]


# -------------------------------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize("device", DEVICES)
def test_requests_times_their_size_are_the_bytes(tmp_path, device):
    path = write_pmc(tmp_path, DEVICES[device])
    traffic = bandwidth.read(path)
    expected = MOVED if device != "gfx90a" else MOVED - 64 * READS[128]  # there all that are not small have 64 bytes
    assert traffic.bytes_are == bandwidth.MEASURED
    assert traffic.rows == [bandwidth.KernelTraffic("k", 2, pytest.approx(5e-6), 2 * expected)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_missing_counter_is_named(tmp_path, device):
    for counter in DEVICES[device]:
        if device == "gfx950" and counter in ("TCC_BUBBLE_sum", "TCC_EA0_RDREQ_sum"):
            continue
        left = {name: count for name, count in DEVICES[device].items() if name != counter}
        if device == "gfx950" and counter == "TCC_EA0_RDREQ_128B_sum":
            (tmp_path / "sysinfo.csv").write_text("workload_name,gpu_arch\nrun,gfx950\n")  # else it is taken for a gfx942
        with pytest.raises(UsageError, match=rf"lacks {counter} \({device}\)"):
            bandwidth.read(write_pmc(tmp_path, left))


def test_ncu_counts_memory_and_l2_and_launches_without_a_count_are_named(tmp_path):
    read, written, l2 = ("Mbyte", [3, 1]), ("byte", [5e5, 0]), ("Kbyte", [9000, 4000])
    metrics = {"dram__bytes_read.sum": read, "dram__bytes_write.sum": written, "lts__t_bytes.sum": l2}
    write_ncu(tmp_path / "kernels.csv", **metrics)
    first, second = sorted(bandwidth.read(tmp_path / "kernels.csv").rows)
    assert (first.bytes, first.l2_bytes, first.seconds) == (3.5e6, 9e6, pytest.approx(1e-6))
    assert (second.bytes, second.l2_bytes) == (1e6, 4e6)

    traffic = bandwidth.read(FIXTURES / "ncu_raw.csv")  # its third launch has n/a
    assert [(row.calls, row.bytes) for row in traffic.rows if row.name == "gemm_kernel"] == [(1, 1024.5e6)]
    assert "left out, 1 of 3 launches: their bytes were not counted" in traffic.notes
    assert table(traffic)[0]["GB/s"] == pytest.approx(1024.5 / 1.5)


def test_counted_flops_and_bytes_stand_under_the_measured_roof(execute, tmp_path):
    """mixbench on an MI200: each work-item reads 8 float64 numbers, and does 16 n + 8 FLOPs."""
    shown = execute(SCRIPT, "--profile-data", FIXTURES / "amd", "--generate-roofline-plot", "--output-dir", "out").out
    assert "FLOPs were not counted" not in shown
    with (tmp_path / "out/points.csv").open() as file:
        points = {re.search(r"\d+(?=u>)|fill", row["name"])[0]: row for row in csv.DictReader(file)}
    assert float(points.pop("fill")["GFLOP"]) == 0 and len(points) == 7
    for n, row in points.items():
        assert float(row["GFLOP"]) == pytest.approx(4194304 * (16 * int(n) + 8) / 1e9)
        assert float(row["MB"]) == pytest.approx(4194304 * 64 / 1e6, rel=1e-3)
        assert row["side"] == ("compute" if int(n) >= 64 else "memory") and 85 < float(row["% of bound"]) < 108
    sides = {row["name"]: row["bound by"] for row in table(bandwidth.read(FIXTURES / "amd"))}
    assert sides["void benchmark_func<double, 256, 8u, 512u>(double, double*) [clone .kd]"] == "compute"


def test_without_all_flop_counters_no_flops_are_told(tmp_path):
    rows = (FIXTURES / "amd/mixbench_mi200/pmc_perf.csv").read_text().replace("MFMA_MOPS_BF16", "OTHER")
    (tmp_path / "pmc_perf.csv").write_text(rows)
    traffic = bandwidth.read(tmp_path)
    assert {row.flops for row in traffic.rows} == {None} and bandwidth.NO_FLOPS_NOTE in traffic.notes


def test_products_in_fp8_are_counted_where_the_gpu_has_a_counter_for_them(tmp_path):
    header, *rows = (FIXTURES / "amd/mixbench_mi200/pmc_perf.csv").read_text().splitlines()
    (tmp_path / "pmc_perf.csv").write_text("\n".join([f"{header},SQ_INSTS_VALU_MFMA_MOPS_F8", *(f"{row},1000" for row in rows)]))
    before, after = (bandwidth.read(folder).rows for folder in (FIXTURES / "amd/mixbench_mi200", tmp_path))
    assert sum(row.flops for row in after) - sum(row.flops for row in before) == len(rows) * 512_000


@needs_samples
def test_a_copy_on_an_mi300a_moves_what_it_reads_and_writes():
    (row,) = bandwidth.read(SAMPLES / "rocprof-compute/no_roof/MI300A_A1").rows
    elements, calls = 2**20, 3  # vcopy -n 1048576, in float64
    assert row.calls == calls and row.bytes == pytest.approx(calls * 2 * 8 * elements, rel=0.01)


@needs_samples
def test_a_copy_on_an_mi200_is_held_against_its_roofline_csv():
    traffic = bandwidth.read(SAMPLES / "rocprof-compute/kernel_names/MI200")
    assert traffic.ceilings["bytes_per_second"] == 1388.9282e9 and "roofline.csv" in traffic.ceilings_from
    row = table(traffic)[0]
    assert row["% of copy"] == pytest.approx(100 * row["GB/s"] / 1388.9282) and 50 < row["% of copy"] < 100
    assert row["bound by"] is None and not bandwidth.report(traffic).files.keys() & {"points.csv"}, "no FLOPs were counted"


# --------------------------------------------------------------------------------------------------------------- shapes


def test_bytes_of_a_gpu_step_by_its_shapes():
    traffic, profile = bandwidth.read(H100), read_json(H100)
    assert traffic.bytes_are == bandwidth.MINIMUM
    moved = sum(row.bytes * row.calls for row in operators.rows(profile) if row.bytes)
    assert sum(row.bytes for row in traffic.rows) == pytest.approx(moved)
    facts = dict(bandwidth.facts(traffic))
    least, step = moved / profile["run"]["ceilings"]["bytes_per_second"], profile["run"]["step_ms"]["median"] / 1e3
    assert f"{100 * least / step:.3g} % of its" in facts["a step"] and "median without the profiler" in facts["a step"]
    assert facts["far"].startswith("most time above the bound: aten::mm (attention)")
    times = [(row.us, row.bytes is None) for row in operators.rows(profile)]
    share = 100 * sum(us for us, unknown in times if unknown) / sum(us for us, _ in times)
    assert any(note.startswith(f"left out, {share:.1f} %") and "optimizer" in note for note in traffic.notes)


def test_a_cpu_profile_as_the_script_shows_it(execute, tmp_path, cpu_trace):
    write_profile(tmp_path / "profile_1.json", cpu_trace)
    shown = execute(SCRIPT, "--profile-data", "profile_1.json", "--generate-roofline-plot", "--output-dir", "out").out
    assert bandwidth.MINIMUM in shown and "aten::mm (mlp)" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bandwidth.csv", "bandwidth.md", "roofline.png"]
    text = (tmp_path / "out/bandwidth.md").read_text()
    assert "](roofline.png)" in text and "a minimum" in text
    rows = list(csv.DictReader((tmp_path / "out/bandwidth.csv").open()))
    product = next(row for row in rows if row["name"] == "aten::mm (loss)")
    calls, rate, moved, us, copied = (float(product[name]) for name in ("calls", "GB/s", "MB", "us", "% of copy"))
    assert calls == 3 and rate == pytest.approx(moved / us * 1e3)
    assert copied == pytest.approx(100 * rate * 1e9 / CEILINGS["bytes_per_second"])


# --------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def folder(tmp_path):
    """As run_all_profilers.sh leaves it on an NVIDIA GPU."""
    path = tmp_path / "complete_rocm_analysis"
    metrics = {"dram__bytes_read.sum": ("byte", [1e6]), "dram__bytes_write.sum": ("byte", [1e6])}
    write_ncu(path / "ncu/kernels.csv", **metrics)
    shutil.copy(H100, path / "profile_1.json")
    return path


def test_counters_come_before_shapes_unless_one_is_missing_and_the_profile_gives_the_ceilings(folder, tmp_path):
    said = bandwidth.analyze(folder, tmp_path / "out", draw_roofline=True)
    assert "measured by counters" in said and "kernel_0" in said and "aten::" not in said
    assert "3,009 GB/s: a large copy in the profiled run" in said and "by its operators' shapes" in said
    assert (tmp_path / "out/roofline.png").stat().st_size > 1000

    write_ncu(folder / "ncu/kernels.csv", **{"dram__bytes_read.sum": ("byte", [1e6])})
    traffic = bandwidth.read(folder)
    assert traffic.bytes_are == bandwidth.MINIMUM and traffic.path == folder / "profile_1.json"
    assert any("lacks dram__bytes_write.sum" in note for note in traffic.notes)


def test_without_a_measured_bandwidth_there_are_no_percentages(folder, tmp_path):
    (folder / "profile_1.json").unlink()
    said = bandwidth.analyze(folder, tmp_path / "out", draw_roofline=False)
    assert "not measured, so no percentages" in said and "%" not in said.split("longest")[1]
    with pytest.raises(UsageError, match="--generate-roofline-plot needs for FLOPs"):
        bandwidth.analyze(folder, tmp_path / "more", draw_roofline=True)
    assert not (tmp_path / "more").exists()


def test_a_profile_of_attention_says_so(tmp_path, cpu_trace):
    write_profile(tmp_path / "profile_1.json", cpu_trace, attention_only=True)
    traffic = bandwidth.read(tmp_path / "profile_1.json")
    assert "only attention was kept" in traffic.notes and all("(attention)" in row.name for row in traffic.rows)


@pytest.mark.parametrize(("name", "message"), [
    ("missing", "missing does not exist"),
    ("empty", "empty says how many bytes were moved"),
    ("ncu_details.csv", "lacks dram__bytes_read.sum, dram__bytes_write.sum"),
    ("pmc_perf.csv", "lacks TCC_EA0_RDREQ_sum"),
    ("new_kernel_trace.csv", "new_kernel_trace.csv says how many bytes were moved"),
])  # fmt: skip
def test_what_cannot_say_it_is_refused_and_nothing_is_written(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    if (FIXTURES / name).is_file():
        shutil.copy(FIXTURES / name, tmp_path)
    with pytest.raises(UsageError, match=message) as refused:
        bandwidth.analyze(tmp_path / name, tmp_path / "out", draw_roofline=False)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()


def test_launches_that_took_no_time_are_told_and_left_out(tmp_path):
    path = write_pmc(tmp_path, DEVICES["gfx942"])
    path.write_text(path.read_text().replace("1000,3000", "1000,1000").replace("9000,12000", "9000,9000"))
    with pytest.raises(UsageError, match="has no launch with both a duration and bytes"):
        bandwidth.read(tmp_path)


def test_rows_and_facts_of_three_kernels_with_known_bounds():
    """At 0.2 GB/s and 1 GFLOP/s: the first is bound by its FLOPs, the second by its bytes, at 95 % of the bandwidth."""
    timed = (("slow", 1, 4.0, 1e8, 2e9), ("fast", 1, 1.0, 1.9e8, 1e8, 5e6), ("not counted", 1, 4.0, 1e8))
    rows = [bandwidth.KernelTraffic(*row) for row in timed]
    traffic = bandwidth.Traffic(rows, bandwidth.MEASURED, Path("p"), CEILINGS, "a copy", [], None)
    cells = table(traffic)
    assert [cell["bound by"] for cell in cells] == ["compute", "memory", None]
    assert [cell["us above bound"] for cell in cells] == pytest.approx([2e6, 0.05e6, 3.5e6])
    assert [cell["% of copy"] for cell in cells] == pytest.approx([12.5, 95, 12.5])
    assert [cell["L2 MB"] for cell in cells] == [None, 5, None]
    bytes_alone = traffic._replace(ceilings=CEILINGS | {"flops_per_second": math.inf})
    assert [cell["bound by"] for cell in table(bytes_alone)] == [None] * 3
    found = dict(bandwidth.facts(traffic))
    assert found["total"] == "390 MB in 9 s of kernels, all that was recorded"
    assert found["at least"] == "1.95 s at that bandwidth, 21.7 % of that time"
    assert found["near (80 %)"] == "1 of 3, the longest fast"
