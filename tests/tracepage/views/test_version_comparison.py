"""Two versions' folders: which of their runs are compared, and what is said where none can be."""

import re
import shutil
from pathlib import Path

from tests.records import record
from tracepage.files import write_json
from tracepage.show.run_facts import ONE_PROCESS
from tracepage.views.version_comparison import render_versions

import pytest


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
    text = render_versions(before, after).terminal()
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
    assert ONE_PROCESS in " ".join(render_versions(before, after).terminal().split())
    save(after / "metrics_2_v2.json", "2026-01-02", step_ms__median=12.0)
    said = "Medians of 3 and 2 processes: 22 ms (20 to 30) and 11 ms (10 to 12); 2 times as fast."
    assert said in " ".join(render_versions(before, after).terminal().split())


def test_the_newest_pair_says_why_and_what_to_run(folders):
    save(folders[0] / "metrics_v1.json", "2026-01-01")
    save(folders[1] / "metrics_v2.json", "2026-01-01", training__batch_size=4)
    save(
        folders[1] / "metrics_failed_v2.json",
        "2026-01-05",
        loss__all=[],
        step_ms={"all": [], "profiled": 0},
    )
    text = render_versions(*folders).terminal()
    newest = f"The newest, {folders[0]}/metrics_v1.json and {folders[1]}/metrics_v2.json, differ: batch size"
    assert newest in " ".join(text.split())
    assert "No two can be compared. Run both with the same flags" in text and "ms/step" not in text
