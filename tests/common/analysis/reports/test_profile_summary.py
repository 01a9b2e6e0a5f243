"""Reports of profiles: figures that add up, one source for text and Markdown, files written whole or not at all."""

import json
import re
import sys

from common.analysis.profiles import step_profile
from common.analysis.reports import profile_summary
from common.errors import UsageError
from common.training import commands, run
from tests.conftest import ROOT, TINY, V1
from tests.small_traces import BATCH, CONFIG, LENGTH, gpu_trace, record_cpu_trace, write_profile

import pytest
import torch

H100 = sorted((ROOT / "results" / "h100").glob("*_profile.json"))


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace_1.json"
    record_cpu_trace(path)
    return path


@pytest.fixture
def cpu_profile(tmp_path, cpu_trace):
    (tmp_path / cpu_trace.name).write_bytes(cpu_trace.read_bytes())
    write_profile(tmp_path / "profile_1.json", cpu_trace)
    return tmp_path / "profile_1.json"


@pytest.fixture
def gpu_profile(tmp_path):
    (tmp_path / "trace_2.json").write_text(json.dumps(gpu_trace()))
    write_profile(tmp_path / "profile_2.json", tmp_path / "trace_2.json")
    return tmp_path / "profile_2.json"


def table(markdown, heading):
    """The cells of the table below a heading that begins so, without its header."""
    lines = markdown.split(f"### {heading}", 1)[1].split("\n### ", 1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return rows[2:]


def sections(report):
    return re.findall("^## (.*)", report.read_text(), re.MULTILINE)


def test_the_spans_and_what_is_outside_them_make_up_a_step(cpu_profile):
    profile = step_profile.read(cpu_profile)
    _, rows = profile_summary.span_rows(profile)
    wall = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
    assert rows[-1][0] == "outside operators (Python)"
    assert sum(row[3] for row in rows) == pytest.approx(wall) and sum(row[4] for row in rows) == pytest.approx(100)


def test_the_idle_gpu_is_what_is_not_busy(gpu_profile):
    profile = step_profile.read(gpu_profile)
    _, rows = profile_summary.span_rows(profile)
    idle = 1 - profile["device_busy_us"] / sum(profile["step_us"])
    assert rows[-1][0] == "idle GPU" and rows[-1][4] == pytest.approx(100 * idle)


@pytest.mark.parametrize("path", H100, ids=lambda path: path.stem)
def test_the_table_of_kernels_holds_every_launch_once(path):
    profile = step_profile.read(path)
    _, rows = profile_summary.kernel_rows(profile)
    assert sum(row[1] for row in rows) == pytest.approx(profile["launch"]["count"] / profile["profiled_steps"])
    assert sum(row[4] for row in rows) == pytest.approx(100)
    times = [row[2] for row in rows]
    assert times == sorted(times, reverse=True) and [row[1] * row[3] for row in rows] == pytest.approx(times)


def test_text_and_markdown_show_the_same_figures(cpu_profile):
    profile = step_profile.read(cpu_profile)
    text, markdown = profile_summary.text(profile), profile_summary.markdown(cpu_profile, profile)
    assert profile_summary.conditions(profile) in text and profile_summary.conditions(profile) in markdown
    plain = [line.split() for line in text.splitlines()]
    for heading in ("Time in operators", "Operators"):
        rows = table(markdown, heading)
        assert rows and all(" ".join(row).split() in plain for row in rows)
    assert "### Kernels" not in markdown


def test_a_gpu_gets_its_kernels(gpu_profile):
    markdown = profile_summary.markdown(gpu_profile, step_profile.read(gpu_profile))
    gemm = next(row for row in table(markdown, "Kernels (per step") if row[0] == "`gemm`")
    assert gemm[1:4] == ["1.5", "59.5", "39.7"]  # 30 + 30 + 59 us in 3 launches of 2 steps
    assert "3 kernels, copies and fills a step" in markdown and "idle" in markdown and "Time on the GPU" in markdown


def test_names_of_kernels_are_code_not_html():
    path = next(path for path in H100 if "tiny" in path.name)
    markdown = profile_summary.markdown(path, step_profile.read(path))
    assert "CUDAFunctor_add<float>" in markdown and not re.search(r"<\w", re.sub(r"`[^`]*`", "", markdown))


def test_a_profile_of_attention_has_no_rest_of_the_step(tmp_path):
    (tmp_path / "trace_2.json").write_text(json.dumps(gpu_trace()))
    write_profile(tmp_path / "profile_2.json", tmp_path / "trace_2.json", attention_only=True)
    markdown = profile_summary.markdown(tmp_path / "profile_2.json", step_profile.read(tmp_path / "profile_2.json"))
    assert [row[0] for row in table(markdown, "Time on the GPU")] == ["attention"]
    assert "### Kernels (attention, per step" in markdown and "### Operators (attention, per step" in markdown


def test_files_are_listed_if_they_are_there(cpu_profile):
    def listed():
        return [row[0] for row in table(profile_summary.markdown(cpu_profile, step_profile.read(cpu_profile)), "Files")]

    assert listed() == ["profile_1.json", "trace_1.json"]
    (cpu_profile.parent / "run_1").mkdir()
    (cpu_profile.parent / "memory_timeline.html").touch()
    assert listed() == ["profile_1.json", "trace_1.json", "run_1", "memory_timeline.html"]


def test_a_folder_has_one_report_with_a_section_for_each_profile(tmp_path, cpu_trace):
    paths = [tmp_path / folder / f"profile_{i}.json" for i, folder in enumerate("aba")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        write_profile(path, cpu_trace)
    for _ in range(2):  # the second time over the first
        assert profile_summary.write(paths) == [tmp_path / "a" / "report.md", tmp_path / "b" / "report.md"]
        assert sections(tmp_path / "a" / "report.md") == ["profile_0.json", "profile_2.json"]
        assert sections(tmp_path / "b" / "report.md") == ["profile_1.json"]


def test_nothing_is_written_if_one_is_no_profile(cpu_profile):
    (cpu_profile.parent / "profile_9.json").write_text("{}")
    with pytest.raises(UsageError, match="not a file of schema tiny-llama-profile/1"):
        profile_summary.write([cpu_profile, cpu_profile.parent / "profile_9.json"])
    assert not (cpu_profile.parent / "report.md").exists()


def test_a_run_writes_its_report_where_its_profile_is(run_script, tmp_path):
    done = run_script(V1 / "run_pytorch_profiler.py", *TINY, "--num-steps", 3, "--profile-dir", "./there", "--profile-memory",
                      "--generate-report")  # fmt: skip
    assert done.stdout.endswith("  report       there/report.md\n")
    report = (tmp_path / "there" / "report.md").read_text()
    files = [row[0] for row in table(report, "Files")]
    assert len(files) == 4 and {*files, "report.md"} == {path.name for path in (tmp_path / "there").iterdir()}
    assert f"## {files[0]}\n" in report and "MiB allocated" in report
    assert {"attention", "mlp", "optimizer"} <= {row[0] for row in table(report, "Time in operators")}


def test_the_script_reports_existing_profiles_where_they_are(run_script, tmp_path, cpu_profile, gpu_profile):
    done = run_script(V1 / "run_pytorch_profiler.py", "--analyze-existing", cpu_profile, gpu_profile,
                      "--generate-report", "--sort-by", "count")  # fmt: skip
    assert f"  report       {tmp_path / 'report.md'}" in done.stdout and "by calls" in done.stdout
    assert sections(tmp_path / "report.md") == ["profile_1.json", "profile_2.json"]
    assert "by calls" in (tmp_path / "report.md").read_text()


def test_a_run_that_was_stopped_gets_no_report_of_an_older_profile(monkeypatch, tmp_path, cpu_profile):
    monkeypatch.setattr(sys, "argv", ["x", "--profile-dir", str(tmp_path), "--generate-report"])
    monkeypatch.setattr(run, "train", lambda version, options: 130)
    with pytest.raises(SystemExit) as ended:
        commands.profile(torch, "any module will do: it is not run")
    assert ended.value.code == 130 and not (tmp_path / "report.md").exists()


def test_figures_of_an_operator_are_a_steps(gpu_profile, cpu_profile):
    profile = json.loads(gpu_profile.read_text()) | {"memory_peak_bytes": 1}
    header, rows, _ = profile_summary.operator_rows(profile)
    product = dict(zip(header, next(row for row in rows if row[0] == "aten::mm"), strict=True))
    own = sum(operator["self_device_us"] for operator in profile["operators"])
    assert (product["calls"], product["self_device ms"]) == (3 / 2, 129 / 2 / 1e3)  # three calls in two steps
    assert product["share %"] == pytest.approx(100 * 129 / own)
    assert "2 profiled steps of 0.09 ms" in profile_summary.conditions(profile)  # (125 + 60) / 2 us
    header, rows, _ = profile_summary.operator_rows(json.loads(cpu_profile.read_text()))
    softmax = dict(zip(header, next(row for row in rows if row[0] == "aten::_softmax"), strict=True))
    assert softmax["calls"] == CONFIG.num_layers
    weights = CONFIG.num_layers * BATCH * CONFIG.num_attention_heads * LENGTH**2 * 4
    assert softmax["MiB allocated"] * 2**20 == pytest.approx(weights)
