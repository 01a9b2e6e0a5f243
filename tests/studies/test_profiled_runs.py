"""The scripts that profile a version or count its FLOPs, in a new run or from the files of an
earlier one.
"""

import json
from pathlib import Path

from tests.conftest import TINY, V1

import pytest

QUICK = (*TINY, "--data", "synthetic", "--num-steps", "4")
PROFILE, COUNT = V1 / "run_pytorch_profiler.py", V1 / "run_deepspeed_flops.py"
pytestmark = pytest.mark.usefixtures("known_ceilings")


def test_deepspeed_flops_and_its_analysis(execute, tmp_path, monkeypatch):
    accelerator = pytest.importorskip("deepspeed.accelerator", reason="needs DeepSpeed")
    # DeepSpeed keeps its first choice, which is a GPU where an earlier test counted on one.
    monkeypatch.setattr(accelerator.real_accelerator, "ds_accelerator", None)
    counted = execute(COUNT, *QUICK)
    assert "## Memory bandwidth" in counted.out and "Setting accelerator" not in counted.err
    shown = execute(
        COUNT,
        "--analyze-results",
        "flops_profile.json",
        "--computational-intensity",
        "--generate-roofline",
    ).out
    assert (
        "span      attention" in shown
        and (tmp_path / "flops_analysis/roofline.png").stat().st_size > 1000
    )
    assert not (tmp_path / "pytorch_profiles").exists(), "whose newest profile others take"
    profile = json.loads((tmp_path / "flops_analysis/flops_profile.json").read_text())
    counts = {row["counter"]: row for row in profile["counts"]}
    assert counts["FlopCounterMode"]["step"] == counts["formula, full S x S"]["step"]
    assert counts["DeepSpeed"]["forward"] == pytest.approx(
        counts["FlopCounterMode"]["forward"], rel=0.03
    )
    assert counts["formula, causal"]["step"] < counts["formula, full S x S"]["step"]
    assert (
        "DeepSpeed" in shown
        and (tmp_path / "flops_analysis/model_profile.txt").stat().st_size > 1000
    )
    assert len((tmp_path / "flops_analysis/mfu_analysis.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    "script, flag, named",
    [
        (COUNT, "--analyze-results", "no missing.json here"),
        (PROFILE, "--analyze-existing", "cannot read missing.json"),
    ],
)
def test_analysis_of_what_is_not_there(refused, tmp_path, script, flag, named):
    assert named in refused(script, flag, "missing.json")
    (tmp_path / "other.json").write_text('{"schema": "x"}')
    assert "found: x" in refused(script, flag, "other.json")


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_existing_profiles_are_shown_without_running_anything(execute, tmp_path):
    execute(PROFILE, *QUICK)
    (profile,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    before = files_below(tmp_path)
    shown = execute(PROFILE, "--analyze-existing", profile).out
    assert (
        "attention" in shown
        and "aten::mm" in shown
        and "1 profiled step of " in " ".join(shown.split())
    )
    assert files_below(tmp_path) == before
