"""Two runs compared: the verdict on two records, two versions' folders, and the fusion report as
Markdown and as a page.
"""

import copy
import re
import shutil
from pathlib import Path

from tests.conftest import ROOT
from tests.records import record
from tracepage.errors import UsageError
from tracepage.files import read_json, write_json
from tracepage.show.run_facts import ONE_PROCESS
from tracepage.views import compare

import pytest

V2 = ROOT / "version2_pytorch_fused"
REGRESSION, VERSIONS, FUSION = (
    V2 / f"{name}.py"
    for name in ("performance_regression_test", "compare_versions", "generate_fusion_report")
)
FAST = dict(
    step_ms={"all": [6.0] * 20, "profiled": 0, "median": 6.0, "p20": 5.5, "p80": 6.5, "count": 20},
    version="v2",
)


def of_20_losses(run: dict) -> dict:
    losses = run["loss"]["all"]
    return run | {"loss": run["loss"] | {"all": losses + losses[-1:] * (20 - len(losses))}}


def verdict(
    tmp_path: Path, before: dict, after: dict, minimum: float = 1.0, tolerance: float = 1e-2
) -> compare.Verdict:
    write_json(tmp_path / "before.json", of_20_losses(before))
    write_json(tmp_path / "after.json", of_20_losses(after))
    return compare.regression(tmp_path / "before.json", tmp_path / "after.json", minimum, tolerance)


def shown(found: compare.Verdict) -> str:
    """The terminal text on one line."""
    return " ".join(found.report.terminal().split())


def test_the_speedup_of_one_process_a_side_and_too_slow_is_a_failure(tmp_path):
    found = verdict(tmp_path, record(), record(**FAST, memory__peak_mib=80.0), minimum=1.9)
    assert (
        f"Speed-up 2. {ONE_PROCESS}" in shown(found)
        and "peak MiB 100 80 1.25" in shown(found)
        and not found.failures
    )
    assert verdict(tmp_path, record(), record(**FAST), minimum=2.5).failures == [
        "the speed-up 2 is below 2.5"
    ]
    assert verdict(tmp_path, record(), record(**FAST), minimum=float("nan")).failures
    assert not verdict(tmp_path, record(), record()).failures
    assert "30 % of the median for current (33 %)" in shown(
        verdict(tmp_path, record(), record(step_ms__p80=15.0))
    )


def test_the_largest_difference_of_the_loss_curves_counts_where_they_have_the_same_inputs(tmp_path):
    other = record(**FAST, loss__all=[7.0, 6.03, 5.0])
    found = verdict(tmp_path, record(), other)
    assert "largest difference 0.03 nats over 20 steps" in shown(found)
    assert found.failures == ["the loss curves differ by 0.03, more than 0.01"]
    assert not verdict(tmp_path, record(), other, tolerance=0.1).failures
    assert verdict(tmp_path, record(), other, tolerance=float("nan")).failures
    for change in (
        {"training__seed": 1},
        {"data__sha256": "cd" * 32},
        {"training__learning_rate": 1e-2},
    ):
        found = verdict(tmp_path, record(), record(**FAST, **change, loss__all=[1.0, 1.0, 1.0]))
        assert not found.failures and "Loss curves: not compared, they differ in" in shown(found)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device__name": "Another GPU"}, "device name (A GPU and Another GPU)"),
        ({"training__batch_size": 4}, "batch size (8 and 4)"),
        ({"precision__compute": "bf16"}, "precision compute (fp32 and bf16)"),
        ({"environment__torch": "2.14.0"}, "torch (2.13.0 and 2.14.0)"),
        ({"loss__all": [7.0] * 21}, "after.json has losses of 21 steps, and 20 were timed"),
        ({"step_ms__profiled": 20}, "all steps of after.json ran under the profiler"),
        (
            {"status": "interrupted", "training__batch_size": 4},
            "not completed (interrupted); batch size (8 and 4)",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_with_every_reason(tmp_path, change, message):
    with pytest.raises(UsageError) as caught:
        verdict(tmp_path, record(), record(**change))
    assert message in str(caught.value)


def test_exit_codes_of_the_regression_test(execute, refused, tmp_path):
    write_json(tmp_path / "before.json", of_20_losses(record()))
    write_json(tmp_path / "after.json", of_20_losses(record(**FAST)))
    arguments = ("--baseline-results", "before.json", "--current-results")
    assert (
        execute(REGRESSION, *arguments, "after.json", "--min-speedup", "1.3")
        .out.splitlines()[-1]
        .startswith("PASS")
    )
    assert (
        "FAIL" in execute(REGRESSION, *arguments, "after.json", "--min-speedup", "3", check=1).out
    )
    said = refused(REGRESSION, *arguments, "missing.json")
    assert (
        "missing.json does not exist" in said
        and "tiny_llama_v1.py --metrics-out before.json" in said
    )
    write_json(tmp_path / "after.json", of_20_losses(record(step_ms__count=19)))
    assert "count is 19, but 20 steps count" in refused(REGRESSION, *arguments, "after.json")


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Two version folders with a script each and nothing measured."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"tiny_llama_{name}.py").touch()
    return tmp_path / "v1", tmp_path / "v2"


def save(path: Path, date: str, **changes) -> None:
    write_json(path, record(**{"version": path.stem[-2:], "date": date} | changes))


def test_the_newest_comparable_pair_of_records_is_taken(folders):
    before, after = folders
    save(before / "metrics_old_v1.json", "2026-01-01")
    save(before / "metrics_v1.json", "2026-01-02", step_ms__median=24.0)
    save(before / "metrics_other_v1.json", "2026-01-05", training__batch_size=4)
    save(after / "metrics_v2.json", "2026-01-03", step_ms__median=6.0, training__seed=7)
    save(after / "metrics_stopped_v2.json", "2026-01-04", status="interrupted")
    write_json(after / "gemm_metrics.json", {"schema": "another/1"})
    # Version 1, run in the other's folder
    save(after / "metrics_v1.json", "2026-01-06", training__batch_size=4)
    text = compare.versions(before, after).terminal()
    assert (
        f"{before / 'metrics_v1.json'}, from" in text
        and f"{after / 'metrics_v2.json'}, from" in text
    )
    assert re.search(r"ms/step +24 +6 +4\n", text)
    assert (
        "Loss curves: not compared, they differ in seed (0 and 7)." in text
        and ONE_PROCESS in " ".join(text.split())
    )


def test_medians_of_processes_are_compared_where_both_sides_have_several(folders):
    """A run's record and the profile of the same run are one process; what cannot be compared is
    none.
    """
    before, after = folders
    for day, ms in enumerate((20.0, 30.0, 22.0), 1):
        save(before / f"metrics_{day}_v1.json", f"2026-01-0{day}", step_ms__median=ms)
    shutil.copy(before / "metrics_3_v1.json", before / "metrics_again_v1.json")
    save(
        before / "metrics_other_v1.json", "2026-01-05", step_ms__median=1.0, training__batch_size=4
    )
    save(after / "metrics_1_v2.json", "2026-01-01", step_ms__median=10.0)
    assert ONE_PROCESS in " ".join(compare.versions(before, after).terminal().split())
    save(after / "metrics_2_v2.json", "2026-01-02", step_ms__median=12.0)
    said = "Medians of 3 and 2 processes: 22 ms (20 to 30) and 11 ms (10 to 12); 2 times as fast."
    assert said in " ".join(compare.versions(before, after).terminal().split())


def test_the_newest_pair_says_why_and_what_to_run(folders):
    save(folders[0] / "metrics_v1.json", "2026-01-01")
    save(folders[1] / "metrics_v2.json", "2026-01-01", training__batch_size=4)
    save(
        folders[1] / "metrics_failed_v2.json",
        "2026-01-05",
        loss__all=[],
        step_ms={"all": [], "profiled": 0},
    )
    text = compare.versions(*folders).terminal()
    newest = f"The newest, {folders[0]}/metrics_v1.json and {folders[1]}/metrics_v2.json, differ: batch size"
    assert newest in " ".join(text.split())
    assert "No two can be compared. Run both with the same flags" in text and "ms/step" not in text


# -------------------------------------------------------------------------------------------------------- fusion report


def test_a_fusion_report_without_profiles_has_the_commands(execute, tmp_path):
    execute(FUSION, "--output-dir", "out")
    text = (tmp_path / "out/fusion_report.md").read_text()
    assert "python tiny_llama_v2.py --num-steps 20" in text and "tiny_llama_v1.py" in text


TITLES = ["Conditions", "Kernel counts and step time", "Ablation", "How to repeat"]


def write_profiles(folder: Path, **changes) -> tuple[Path, Path]:
    """A measured profile of Version 1 on a CPU, and one made from it as Version 2: half the calls
    of attention.
    """
    before = read_json(ROOT / "results/cpu/v1_tiny_profile.json.gz")
    after = copy.deepcopy(before)
    after["run"] |= {
        "version": "v2",
        "settings": {"qkv": True},
        "command": "v2.py '<script>alert(1)</script>'",
    } | changes
    for row in after["operators"]:
        if row["span"] == "attention":
            row |= {"self_cpu_us": row["self_cpu_us"] / 2, "calls": row["calls"] // 2}
    for name, profile in (("before", before), ("after", after)):
        (folder / name).mkdir()
        write_json(folder / name / "profile_1.json", profile)
    return folder / "before", folder / "after"


def test_the_page_has_what_the_markdown_has_and_needs_nothing_from_elsewhere(execute, tmp_path):
    before, after = write_profiles(tmp_path)
    execute(FUSION, "--baseline", before, "--fused", after, "--output-dir", "out")
    markdown, page = (
        (tmp_path / "out/fusion_report").with_suffix(suffix).read_text()
        for suffix in (".md", ".html")
    )
    titles = re.findall("^## (.*)", markdown, re.MULTILINE)
    assert titles == TITLES == re.findall(r"<h2[^>]*>([^<]+)", page)
    assert "fusion_ablation_study.py --all-combinations" in markdown
    assert not re.search("<(script|img|iframe|object|embed)", page) and "&lt;script&gt;" in page
    targets = re.findall(r"""\b(?:src|href)=["']?([^"'\s>]*)""", page)
    assert targets and all(target.startswith(("#", "data:")) for target in targets)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_what_cannot_be_reported_is_refused_and_nothing_is_written(refused, tmp_path):
    assert "missing holds no profile_*.json" in refused(
        FUSION, "--baseline", "missing", "--output-dir", "out"
    )
    before, after = write_profiles(tmp_path, precision={"compute": "bf16", "tf32": False})
    profiles = "--baseline", before, "--fused", after
    assert "precision compute (fp32 and bf16)" in refused(FUSION, *profiles, "--output", "a.md")
    assert "--output a.html: name a .md file" in refused(
        FUSION, "--baseline", before, "--fused", before, "--output", "a.html"
    )
    assert not list(tmp_path.glob("a.*")) and not (tmp_path / "out").exists()
