"""Two runs compared: the verdict on two records, two versions' folders, and the fusion report as Markdown and as a page."""

import copy
import json
import re
import shutil
from pathlib import Path

from common.analysis.comparisons import compare, source_diff
from common.errors import UsageError
from common.files import read_json, write_json
from tests.conftest import ROOT, TINY, V1
from tests.records import record, save_profile

import pytest

V2 = ROOT / "version2_pytorch_fused"
REGRESSION, VERSIONS, FUSION = (
    V2 / f"{name}.py" for name in ("performance_regression_test", "compare_versions", "generate_fusion_report")
)

# ---------------------------------------------------------------------------------------------------------- run records


def verdict(tmp_path: Path, before: dict, after: dict, minimum: float = 1.0, tolerance: float = 1e-2) -> compare.Verdict:
    write_json(tmp_path / "before.json", before)
    write_json(tmp_path / "after.json", after)
    return compare.regression(tmp_path / "before.json", tmp_path / "after.json", minimum, tolerance)


def shown(found: compare.Verdict) -> str:
    """The terminal text on one line."""
    return " ".join(found.report.terminal().split())


def table_row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


FAST = dict(step_ms={"all": [6.0] * 20, "profiled": 0, "median": 6.0, "p20": 5.5, "p80": 6.5, "count": 20}, version="v2")


def test_speedup_with_its_range_and_memory_and_too_slow_is_a_failure(tmp_path):
    found = verdict(tmp_path, record(), record(**FAST, memory__peak_mib=80.0), minimum=1.9)
    assert "Speed-up 2, from 1.69 to 2.36" in shown(found)  # 11 / 6.5 and 13 / 5.5
    assert table_row(found.report.terminal(), "peak MiB")[-3:] == ["100", "80", "1.25"]
    assert not found.failures and "overlap" not in shown(found)

    assert verdict(tmp_path, record(), record(**FAST), minimum=2.5).failures == ["the speed-up 2 is below 2.5"]
    assert verdict(tmp_path, record(), record(**FAST), minimum=float("nan")).failures
    same = verdict(tmp_path, record(), record())
    assert not same.failures and "overlap" in shown(same)
    assert "30 % of the median for current (33 %)" in shown(verdict(tmp_path, record(), record(step_ms__p80=15.0)))
    assert verdict(tmp_path, record(**FAST), record()).failures


def test_the_largest_difference_of_the_loss_curves_counts(tmp_path):
    other = record(**FAST, loss__all=[7.0, 6.03, 5.0, 4.0])
    found = verdict(tmp_path, record(), other)
    assert "largest difference 0.03 nats over 3 steps" in shown(found)
    assert table_row(found.report.terminal(), "loss at step 3")[-2:] == ["5", "5"]
    assert found.failures == ["the loss curves differ by 0.03, more than 0.01"]
    assert not verdict(tmp_path, record(), other, tolerance=0.1).failures
    assert not verdict(tmp_path, record(), record(**FAST), tolerance=0).failures
    assert verdict(tmp_path, record(), other, tolerance=float("nan")).failures


@pytest.mark.parametrize("change", [
    {"training__seed": 1}, {"data__sha256": "cd" * 32}, {"training__learning_rate": 1e-2}, {"training__first_step": 5},
    {"training__lr_schedule": "cosine to step 20"},
])  # fmt: skip
def test_losses_of_other_data_are_not_compared(tmp_path, change):
    found = verdict(tmp_path, record(), record(**FAST, **change, loss__all=[1.0, 1.0, 1.0]))
    assert not found.failures and "Loss curves: not compared, they differ in" in shown(found)


@pytest.mark.parametrize("change, message", [
    ({"device__name": "Another GPU"}, "device name (A GPU and Another GPU)"),
    ({"training__batch_size": 4}, "batch size (8 and 4)"),
    ({"training__sequence_length": 64}, "sequence length (128 and 64)"),
    ({"model__num_layers": 8}, "model num_layers (4 and 8)"),
    ({"precision__compute": "bf16"}, "precision compute (fp32 and bf16)"),
    ({"precision__tf32": True}, "precision tf32 (False and True)"),
    ({"environment__torch": "2.14.0"}, "torch (2.13.0 and 2.14.0)"),
    ({"status": "interrupted"}, "after.json was not completed (interrupted)"),
    ({"step_ms__profiled": 20}, "all steps of after.json ran under the profiler"),
    ({"status": "interrupted", "training__batch_size": 4}, "not completed (interrupted); batch size (8 and 4)"),
    ({"loss__all": [2.0, float("nan")]}, "after.json: loss.all.1"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_with_every_reason(tmp_path, change, message):
    with pytest.raises(UsageError) as caught:
        verdict(tmp_path, record(), record(**change))
    assert message in str(caught.value)


def test_exit_codes_of_the_regression_test(execute, refused, tmp_path):
    write_json(tmp_path / "before.json", record())
    write_json(tmp_path / "after.json", record(**FAST))
    arguments = ("--baseline-results", "before.json", "--current-results")
    assert execute(REGRESSION, *arguments, "after.json", "--min-speedup", "1.3").out.splitlines()[-1].startswith("PASS")
    assert "FAIL" in execute(REGRESSION, *arguments, "after.json", "--min-speedup", "3", check=1).out
    assert refused(REGRESSION, *arguments, "missing.json").startswith("error: cannot read missing.json")


# ------------------------------------------------------------------------------------------------------------- versions

BLOCK = """
class Block:
    size = 3

    def __init__(self):
        self.a = 1

    @property
    def area(self):
        return self.size
"""
KEPT = "\ndef kept(x):{}\n    return x\n"
BEFORE = f'''"""One."""
import math
{KEPT.format("")}
def attention(q):
    """Scores."""
    q = q * 2

    return q
{BLOCK}
def dropped():
    return 0
'''
AFTER = f'''"""Two."""
import math
{BLOCK.replace("= 1", "= 1" + chr(10) + 8 * " " + "self.b = 2")}{KEPT.format(chr(10))}
def plain_attention(q):
    """Scores."""
    q = q * 2
    return q

def attention(q):
    return 2 * q
'''


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Two version folders with a script each and nothing measured."""
    for name, text in (("v1", BEFORE), ("v2", AFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"tiny_llama_{name}.py").write_text(text)
    return tmp_path / "v1", tmp_path / "v2"


def save(path: Path, date: str, **changes) -> None:
    write_json(path, record(**{"version": path.stem[-2:], "date": date} | changes))


def said(*folders: Path) -> str:
    """The report on one line."""
    return " ".join(compare.versions(*folders, None).split())


def test_definitions_are_compared_one_by_one(folders):
    scripts = (folder / f"tiny_llama_{folder.name}.py" for folder in folders)
    changes = {change.name: change[1:] for change in source_diff.compare(*scripts)}
    assert changes == {
        "(module level)": ("changed", 2, 2, 1, 1),
        "Block": ("same", 2, 2, 0, 0),  # without its methods
        "Block.__init__": ("changed", 2, 3, 1, 0),
        "Block.area": ("same", 3, 3, 0, 0),  # with its decorator
        "kept": ("same", 2, 2, 0, 0),  # it moved, and has a blank line more
        "plain_attention": ("new, with the body of the old attention", 0, 4, 4, 0),
        "attention": ("changed", 4, 2, 1, 3),
        "dropped": ("gone", 2, 0, 0, 2),
    }
    assert table_row(compare.versions(*folders, None), "all of these") == ["all", "of", "these", "10", "11", "7", "6"]


def test_the_newest_comparable_pair_of_records_is_taken(folders):
    before, after = folders
    save(before / "metrics_old_v1.json", "2026-01-01")
    save(before / "metrics_v1.json", "2026-01-02", step_ms__median=24.0)
    save(before / "metrics_other_v1.json", "2026-01-05", training__batch_size=4)
    save(after / "metrics_v2.json", "2026-01-03", step_ms__median=6.0, training__seed=7)
    save(after / "metrics_stopped_v2.json", "2026-01-04", status="interrupted")
    write_json(after / "gemm_metrics.json", {"schema": "another/1"})
    save(after / "metrics_v1.json", "2026-01-06", training__batch_size=4)  # Version 1, run in the other's folder
    text = compare.versions(before, after, None)
    files = [table_row(text, f"{name}  ")[1] for name in ("v1", "v2")]
    assert files == [f"{before / 'metrics_v1.json'},", f"{after / 'metrics_v2.json'},"]
    assert table_row(text, "ms/step, median")[-3:] == ["24", "6", "4"]
    assert table_row(text, "parameters")[-2:] == ["1,000", "1,000"]
    assert "Loss curves: not compared, they differ in seed (0 and 7)." in text


def test_the_nearest_pair_says_why_and_what_to_run(folders):
    save(folders[0] / "metrics_v1.json", "2026-01-01")
    save(folders[0] / "metrics_far_v1.json", "2026-01-09", device__name="Another", environment__torch="2.14.0")
    save(folders[1] / "metrics_v2.json", "2026-01-01", training__batch_size=4)
    save(folders[1] / "metrics_failed_v2.json", "2026-01-05", loss__all=[], step_ms={"all": [], "profiled": 0})
    text = compare.versions(*folders, None)
    nearest = f"The nearest are {folders[0]}/metrics_v1.json and {folders[1]}/metrics_v2.json, which differ: batch size"
    assert nearest in " ".join(text.split())
    for folder in folders:
        assert f"    (cd {folder} && python tiny_llama_{folder.name}.py --num-steps 100 --enable-pytorch-profiler)" in text
    assert "There are no profiles of v1" in text and "ms/step" not in text


def test_profiles_of_another_shape_than_the_runs_give_no_numbers(folders):
    for folder in folders:
        save(folder / f"metrics_{folder.name}.json", "2026-01-01")
        run = record(version=folder.name, date="2026-01-02", training__batch_size=4, step_ms__profiled=20)
        save_profile(folder / "scaling_bs4", run)
    text = said(*folders)
    assert "batch size 8, sequence length 128; D 256" in text
    assert "No two profiles of the shape above can be compared" in text and "batch size (8 and 4)" in text
    assert "v1 ms" not in text, "no times of profiles"
    for folder, us in zip(folders, (5000.0, 2000.0), strict=True):
        kernels = [{"name": "gemm", "device_us": us}]
        save_profile(folder / "profiles", record(version=folder.name, date="2026-01-01"), kernels=kernels)
    text = said(*folders)
    assert "attention 5 2 2.5 1 1 " in text, "before, after, before / after, and launches"
    assert "v1 ms" in text and "profiles/profile_1.json" in text and "scaling_bs4" not in text


def test_real_runs_and_profiles(execute, tmp_path):
    records = []
    for folder, steps in ((V1, 8), (V2, 6)):
        place = tmp_path / folder.name
        place.mkdir()
        script = next(folder.glob("tiny_llama_v*.py"))
        shutil.copy(script, place)
        records.append(place / f"{script.stem}_metrics.json")
        quick = (*TINY, "--data", "synthetic", "--num-steps", steps, "--profile-dir", place / "a" / "b")
        execute(script, *quick, "--metrics-out", records[-1])
    found = compare.regression(*records, 0.001, 1e-4)
    assert "over 6 steps" in shown(found) and not found.failures
    losses = [read_json(path)["loss"]["all"] for path in records]
    assert losses[0][:6] == pytest.approx(losses[1], abs=1e-5)  # the batches do not depend on the number of steps
    printed = execute(VERSIONS, "--v1", V1.name, "--v2", V2.name, "--output", "made/versions.md").out
    written = (tmp_path / "made/versions.md").read_text()
    assert printed.endswith("written: made/versions.md\n") and "| attention |" in written and "| ms/step, median |" in written
    calls = table_row(printed, "attention")
    assert int(calls[-2]) > int(calls[-1]) > 0, "Version 2 calls fewer operators in attention"
    assert "A median is of only 3 timed steps" in printed and "v1 operator calls" in printed


@pytest.mark.parametrize("first, second, message", [
    ("v1", "v1", "both hold tiny_llama_v1.py"),
    ("v1", "nothing", r"--v2: .*nothing holds no tiny_llama_vN.py"),
    ("both", "v2", r"--v1: .*both holds tiny_llama_v1.py and tiny_llama_v2.py"),
    ("v1", "broken", "is not valid Python"),
    ("damaged", "v2", "metrics_v4.json is not JSON or is cut off"),
])  # fmt: skip
def test_folders_that_are_no_version_are_refused(folders, tmp_path, first, second, message):
    for name, scripts in (("both", {"v1": "", "v2": ""}), ("broken", {"v3": "def"}), ("damaged", {"v4": ""})):
        (tmp_path / name).mkdir()
        for script, text in scripts.items():
            (tmp_path / name / f"tiny_llama_{script}.py").write_text(text)
    (tmp_path / "damaged/metrics_v4.json").write_text(json.dumps(record())[:40])
    with pytest.raises(UsageError, match=message):
        compare.versions(tmp_path / first, tmp_path / second, None)


# -------------------------------------------------------------------------------------------------------- fusion report

TITLES = [
    "Conditions", "Step time", "Kernel counts", "Memory against sequence length", "Roofline", "Ablation", "How to repeat",
]  # fmt: skip
FIGURES = ["step-time", "kernels", "memory", "roofline", "ablation"]
STUDY = ROOT / "results" / "h100" / "v2_ablation_tiny_fp32.json"


def write_profiles(folder: Path, device: str, **changes) -> tuple[Path, Path]:
    """A measured profile of Version 1, and one made from it as Version 2: half the launches of attention in half the time."""
    before = read_json(ROOT / "results" / device / "v1_tiny_profile.json.gz")
    after = copy.deepcopy(before)
    after["run"] |= {"version": "v2", "settings": {"qkv": True}, "command": "v2.py '<script>alert(1)</script>'"} | changes
    for row in after["operators"] + after["kernels"]:
        if row["span"] == "attention":
            row |= {key: row[key] / 2 for key in ("self_cpu_us", "self_device_us", "device_us") if key in row}
            row["calls"] //= 2
    for name, profile in (("before", before), ("after", after)):
        (folder / name).mkdir()
        write_json(folder / name / "profile_1.json", profile)
    return folder / "before", folder / "after"


def write_lengths(folder: Path, device: str, *lengths: int) -> list[Path]:
    """Profiles at several lengths, with flash attention (memory linear in S) and without (a square term more)."""
    profile = read_json(ROOT / "results" / device / "v1_tiny_profile.json.gz")
    folders = []
    for kind, square in (("flash", 0), ("plain", 2**12)):
        for length in lengths or (128, 256, 512, 1024):
            folders.append(folder / f"{kind}_attention_seq{length}")
            folders[-1].mkdir()
            profile["run"] |= {"version": "v2", "settings": {"flash_attention": kind == "flash"}}
            profile["run"]["training"]["sequence_length"] = length
            peak = 2**28 + 2**17 * length + square * length**2
            write_json(folders[-1] / "profile_1.json", profile | {"memory_peak_bytes": peak})
    return folders


def write_report(output: Path, before: Path, after: Path, study: Path | None = None, lengths=None) -> tuple[str, str]:
    """The report as Markdown and as a page."""
    compare.fusion_report([before], [after], study, lengths, output)
    return output.read_text(), output.with_suffix(".html").read_text()


def parts(markdown: str) -> dict[str, str]:
    """The sections by title."""
    return dict(part.split("\n", 1) for part in markdown.split("\n## ")[1:])


@pytest.fixture(scope="module", params=["h100", "cpu"])
def made(request, tmp_path_factory) -> tuple[str, str]:
    """Markdown and page of a report with all sections, from what was measured on a device."""
    folder = tmp_path_factory.mktemp("report")
    lengths = write_lengths(folder, request.param)
    return write_report(folder / "out" / "report.md", *write_profiles(folder, request.param), STUDY, lengths)


def test_both_forms_have_the_same_sections_and_numbers_and_figures_have_names(made):
    markdown, page = made
    assert list(parts(markdown)) == re.findall(r"<h2[^>]*>([^<]+)", page) == TITLES
    drawn = re.findall(r'<svg id="([^"]+)" role="img" viewBox="[^"]+"[^>]*><title>[^<]+</title>', page)
    assert drawn == [f"{name}-figure" for name in FIGURES] and page.count("<svg") == len(FIGURES)
    assert "Not measured" not in markdown + page

    row = next(line for line in made[0].splitlines() if line.startswith("| attention | forward |"))
    cells = [float(cell.replace(",", "")) for cell in row.split("|")[3:5]]
    assert cells[0] == pytest.approx(2 * cells[1], rel=0.02)
    assert ("kernels" if "GPU idle" in made[0] else "operator calls") in made[0]
    for text in made:
        assert "v2, " in text and "qkv on" in text and "QKV + flash + SwiGLU + compile" in text


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_text_of_a_record(made):
    assert not re.search("<(script|img|iframe|object|embed)", made[1])
    targets = re.findall(r"""\b(?:src|href)=["']?([^"'\s>]*)""", made[1])
    assert targets and all(target.startswith(("#", "data:")) for target in targets)
    assert not re.search(r"@import|url\((?!#)", made[1]) and "&lt;script&gt;" in made[1]
    ids = re.findall(r'\bid="([^"]+)"', made[1])
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', made[1])
    assert references and {one or other for one, other in references} <= set(ids)


def test_a_section_without_its_measurement_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = write_profiles(tmp_path, "h100")
    profile = read_json(before / "profile_1.json")
    profile["run"]["ceilings"] = None
    write_json(before / "profile_1.json", profile)
    markdown, page = write_report(tmp_path / "a.md", before, after)
    assert list(parts(markdown)) == TITLES
    for title, command in (
        ("Memory against sequence length", "--disable-flash-attention --profile-dir ./plain_attention_seq${seq_len}; done"),
        ("Roofline", "--measure-peak"),
        ("Ablation", "python fusion_ablation_study.py --all-combinations"),
    ):
        assert parts(markdown)[title].strip().startswith("Not measured") and command in parts(markdown)[title]
    assert page.count("<svg") == 2


def test_an_interrupted_study_of_memory_leaves_its_section_out(tmp_path, monkeypatch):
    """Two of its folders made the command refuse the whole report."""
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "plain_attention_seq512"
    empty.mkdir()
    profiles, short = write_profiles(tmp_path, "cpu"), write_lengths(tmp_path, "cpu", 128, 256)
    section = parts(write_report(tmp_path / "a.md", *profiles)[0])["Memory against sequence length"]
    assert section.strip().startswith("Not measured (plain_attention_seq512 holds no profile") and "--seq-len" in section
    for named, message in ((short, "needs at least 3"), ([empty], "holds no profile")):
        with pytest.raises(UsageError, match=message):
            write_report(tmp_path / "b.md", *profiles, lengths=named)


def test_what_the_other_commands_write_is_found(execute, tmp_path):
    """`run_all_profilers.sh` writes complete_analysis, which was not looked at."""
    version1, version2 = tmp_path / "version1_pytorch_baseline", tmp_path / "version2_pytorch_fused"
    before, after = write_profiles(tmp_path, "cpu")
    shutil.copytree(before, version1 / "complete_analysis")
    shutil.copytree(after, version2 / "complete_analysis")
    write_lengths(version2, "cpu")
    (version2 / "fusion_ablation").mkdir()
    shutil.copy(STUDY, version2 / "fusion_ablation" / "fusion_ablation.json")
    # A newer profile of another shape, which made the command refuse.
    other = read_json(before / "profile_1.json")
    other["run"] |= {"date": "2030-01-01"}
    other["run"]["training"]["batch_size"] *= 2
    (version1 / "pytorch_profiles").mkdir()
    write_json(version1 / "pytorch_profiles/profile_2.json", other)
    start = tmp_path / "start.py"  # scripts start in tmp_path, the documented lines in a version's folder
    start.write_text(f"import os, runpy; os.chdir({str(version2)!r}); runpy.run_path({str(FUSION)!r}, run_name='__main__')")
    assert "written: " in execute(start, "--output-dir", "./optimization_analysis").out
    text = (version2 / "optimization_analysis/fusion_report.md").read_text()
    assert "Not measured" not in text and "../version1_pytorch_baseline/complete_analysis/profile_1.json, from" in text
    assert "Passed over ../version1_pytorch_baseline/pytorch_profiles/profile_2.json, which is newer than" in text
    named = "--baseline", "../version1_pytorch_baseline/complete_analysis", "--fused", "./complete_analysis"
    execute(start, *named, "--output", "./fusion_comparison_report.md")
    assert (version2 / "fusion_comparison_report.html").read_text().count("<svg") == len(FIGURES)


def test_a_missing_profile_names_the_command(refused, tmp_path):
    said = refused(FUSION, "--output-dir", "out")
    assert said.startswith("error: ../version1_pytorch_baseline/pytorch_profiles holds no profile_*.json")
    assert "tiny_llama_v1.py --num-steps 30 --profile-dir" in said
    before, _ = write_profiles(tmp_path, "cpu")
    with pytest.raises(UsageError, match=r"holds no profile_\*.json: make one with `python tiny_llama_v2.py"):
        write_report(tmp_path / "a.md", before, tmp_path / "nothing")
    assert not list(tmp_path.glob("**/*.md"))


def test_what_cannot_be_reported_is_refused(tmp_path):
    before, after = write_profiles(tmp_path, "cpu", precision={"compute": "bf16", "tf32": False})
    for other, name, message in (
        (after, "a.md", r"precision compute \(fp32 and bf16\)"),
        (after, "a.html", r"a\.html: name a \.md file"),
        (before / "profile_1.json", "a.md", "given twice"),
    ):
        with pytest.raises(UsageError, match=message):
            write_report(tmp_path / name, before, other)
    assert not list(tmp_path.glob("a.*"))


@pytest.mark.parametrize("arguments", [[], ["--output", "a.md", "--output-dir", "b"]], ids=["no output", "two outputs"])
def test_one_output_is_named(refused, arguments):
    refused(FUSION, *arguments)
