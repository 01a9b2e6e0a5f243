"""Summaries of profiles: numbers that add up, one source for terminal and Markdown, reports written
whole or not at all.
"""

import json
import re

from tests.conftest import ROOT, TINY, V1
from tests.small_traces import BATCH, CONFIG, LENGTH
from tracepage.readers import pytorch
from tracepage.records import step_profile
from tracepage.views import launches, profile_summary

import pytest

PROFILES = sorted((ROOT / "results").glob("*/*_profile.json.gz"))
H100 = [path for path in PROFILES if path.parent.name == "h100"]
# of a millisecond; a quick or a busy machine has another one than ours
UNITS = {"us": 1e3, "ms": 1, "s": 1e-3}


def table(markdown: str, title: str) -> list[list[str]]:
    """The cells of the table whose title begins so, without its header."""
    lines = markdown.split(f"**{title}", 1)[1].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines][2:]


def markdown(path) -> str:
    return profile_summary.summary_report([path]).markdown()


def sections(report) -> list[str]:
    return re.findall("^## (.*)", report.read_text(), re.MULTILINE)


def test_the_spans_and_what_is_outside_them_or_the_idle_gpu_make_up_a_step(
    cpu_profile, gpu_profile
):
    profile = step_profile.read(cpu_profile)
    header, rows = profile_summary.span_rows(profile)
    wall = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
    scale = UNITS[header[3].removeprefix("total ")]
    assert rows[-1][0] == "outside operators (Python)"
    assert sum(row[3] for row in rows) == pytest.approx(scale * wall) and sum(
        row[4] for row in rows
    ) == pytest.approx(100)

    profile = step_profile.read(gpu_profile)
    header, rows = profile_summary.span_rows(profile)
    idle = 1 - profile["device_busy_us"] / sum(profile["step_us"])
    assert rows[-1][0] == "idle GPU" and rows[-1][4] == pytest.approx(100 * idle)
    assert header[3] == "total us" and rows[-1][3] == pytest.approx((125 + 60 - 159) / 2)


def test_the_table_of_kernels_holds_every_launch_once():
    profile = step_profile.read(H100[0])
    header, rows = launches.kernel_rows(
        launches.summary(pytorch.read_profile(H100[0])), "kernel", profile["profiled_steps"]
    )
    assert sum(row[1] for row in rows) == pytest.approx(
        profile["launch"]["count"] / profile["profiled_steps"]
    )
    assert sum(row[4] for row in rows) == pytest.approx(100)
    times = [row[2] * {"total us": 1, "total ms": 1e3}[header[2]] for row in rows]
    assert times == sorted(times, reverse=True) and [
        row[1] * row[3] for row in rows
    ] == pytest.approx(times)


def test_the_script_reports_existing_profiles_where_they_are(
    execute, tmp_path, cpu_profile, gpu_profile
):
    shown = execute(
        V1 / "run_pytorch_profiler.py",
        "--analyze-existing",
        cpu_profile,
        gpu_profile,
        "--generate-report",
        "--sort-by",
        "count",
    ).out
    assert f"  report       {tmp_path / 'report.md'}" in shown and "sorted by calls" in shown
    assert sections(tmp_path / "report.md") == ["profile_1.json", "profile_2.json"]
    assert "sorted by calls" in (tmp_path / "report.md").read_text()


def test_numbers_of_an_operator_are_those_of_a_mean_step(gpu_profile, cpu_profile):
    profile = json.loads(gpu_profile.read_text()) | {
        "memory_peak_bytes": 1,
        "operator_flops": {"aten::mm": 6e9},
    }
    header, rows, _ = profile_summary.operator_rows(profile)
    product = dict(zip(header, next(row for row in rows if row[0] == "aten::mm"), strict=True))
    own = sum(operator["self_device_us"] for operator in profile["operators"])
    # three calls in two steps
    assert (product["calls"], product["self GPU us"]) == (3 / 2, pytest.approx(129 / 2))
    assert product["GFLOP"] == 3 and [row[4] for row in rows] == sorted(
        (row[4] for row in rows), reverse=True
    )
    assert product["share %"] == pytest.approx(100 * 129 / own)
    assert "2 profiled steps of 92.5 us" in profile_summary.conditions(profile)  # (125 + 60) / 2
    header, rows, _ = profile_summary.operator_rows(json.loads(cpu_profile.read_text()))
    softmax = dict(
        zip(header, next(row for row in rows if row[0] == "aten::_softmax"), strict=True)
    )
    assert softmax["calls"] == CONFIG.num_layers
    weights = CONFIG.num_layers * BATCH * CONFIG.num_attention_heads * LENGTH**2 * 4
    assert softmax["MiB allocated"] * 2**20 == pytest.approx(weights)


def test_a_run_writes_the_report_of_its_own_profile_where_that_is(
    execute, known_ceilings, tmp_path
):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/profile_20200101T000000_1.json").write_text("an earlier run's")
    shown = execute(
        V1 / "run_pytorch_profiler.py",
        *TINY,
        "--data",
        "synthetic",
        "--num-steps",
        3,
        "--profile-dir",
        "./there",
        "--profile-memory",
        "--generate-report",
    ).out
    assert shown.endswith("  report       there/report.md\n")
    report = (tmp_path / "there" / "report.md").read_text()
    assert "20200101" not in report and "MiB allocated" in report
    assert {"attention", "mlp", "optimizer"} <= {
        row[0] for row in table(report, "Time in operators")
    }
