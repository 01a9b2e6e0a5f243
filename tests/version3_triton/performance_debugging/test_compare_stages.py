"""The comparison of the stages: each rule, and the runs that it refuses."""

import shutil
from pathlib import Path

from tests.conftest import ROOT
from tests.version3_triton.performance_debugging.conftest import FOLDER, NAMES
from tracepage.errors import UsageError
from tracepage.files import read_json, write_json

import compare_stages
import pytest


@pytest.fixture
def results(tmp_path, train) -> Path:
    """Records as run_all_stages.sh leaves them, all of the same run: Version 1, stage 5, and stage
    2 with its fix.
    """
    record = train("stage5") | {
        "step_ms": {
            "all": [20.0] * 3,
            "profiled": 0,
            "median": 20.0,
            "p20": 18.0,
            "p80": 22.0,
            "count": 3,
        }
    }
    folder = tmp_path / "results"
    folder.mkdir()
    write_json(
        folder / "stage0_metrics.json",
        {key: value for key, value in record.items() if key != "stage"} | {"version": "v1"},
    )
    for name in ("stage5", "stage2", "stage2_fixed"):
        written = record | {
            "version": NAMES[name[:6]],
            "stage": record["stage"] | {"fixed": name.endswith("fixed")},
        }
        write_json(folder / f"{name}_metrics.json", written)
    return folder


def change(path: Path, **sections: dict) -> None:
    record = read_json(path)
    write_json(
        path, record | {name: record.get(name, {}) | values for name, values in sections.items()}
    )


def verdict(folder: Path, name: str = "2 slow performance") -> str:
    """What the report says of a stage, below its table."""
    sections = compare_stages.report(compare_stages.read(folder)).sections
    [observations] = [section for section in sections if section.title == "Key observations"]
    return next(dict(item.content) for item in observations.items if item.kind == "facts")[name]


def slow(median: float) -> dict[str, float]:
    return {"median": median, "p20": 0.9 * median, "p80": 1.1 * median, "all": [median] * 3}


def test_nothing_is_found_where_nothing_is_wrong_and_own_stages_are_compared(results):
    for name in ("2 slow performance", "2 slow performance, fixed", "5 optimized"):
        assert verdict(results, name) == "nothing found"

    shutil.copy(results / "stage2_metrics.json", results / "stage10_metrics.json")
    assert [stage.number for stage in compare_stages.read(results)] == [0, 2, 2, 5, 10]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"loss": {"all": [200.0, 9.0, 6.0]}},
            "the loss starts at 200.0, a uniform guess costs 6.9",
        ),
        (
            {"loss": {"all": [6.9, 6.9, 8.0]}},
            "it learns less: the loss ends at 7.27, Version 1's at",
        ),
        ({"stage": {"updated": 1}}, "13 of 14 parameters never get a gradient"),
        ({"step_ms": slow(80.0)}, "4.0 times stage 5's step"),
        ({"step_ms": slow(10.0)}, "2.0 times as fast as stage 5: what does it leave out?"),
        ({"step_ms": slow(25.0)}, "nothing found"),  # within the spread of processes
        (
            {
                "phases_ms": dict.fromkeys(
                    ("forward", "backward", "optimizer"), slow(8 / 3) | {"count": 3}
                ),
                "device": {"kind": "cuda"},
            },
            "the phases add up to 40% of the step: their clock does not wait for the device",
        ),
    ],
    ids=("start", "learning", "gradient", "slower", "faster", "spread", "clock"),
)
def test_each_rule(results, changes, found):
    if "device" in changes:
        for path in results.glob("*.json"):
            change(path, device=changes["device"])
    change(results / "stage2_metrics.json", **changes)
    assert verdict(results).startswith(found)


def test_the_comparison_is_printed_and_written(results, execute):
    slow_and_wrong = {
        "step_ms": slow(80.0),
        "loss": {"all": [200.0, 9.0, 6.0]},
        "stage": {"caveat": "less to see here"},
    }
    change(results / "stage2_metrics.json", **slow_and_wrong)
    shown = execute(
        FOLDER / "compare_stages.py", "--results-dir", results, "--output", "tables/comparison.md"
    ).out
    written = (results.parent / "tables/comparison.md").read_text()
    answer = verdict(results)
    assert answer.endswith("; 4.0 times stage 5's step")
    for text in (" ".join(shown.split()), written):
        assert "Version 1" in text and answer in text and "Stage 2: less to see here." in text
    [row] = [line for line in written.splitlines() if line.startswith("| 2 slow performance |")]
    assert "| 25 | 0.25 | 14 of 14 |" in row  # 2 samples in 80 ms, where Version 1 takes 20


def test_runs_that_were_not_made_alike_are_not_compared(results):
    change(results / "stage2_metrics.json", training={"batch_size": 64})
    with pytest.raises(
        UsageError, match=r"stage 2 slow performance differ in batch size \(2 and 64\)"
    ):
        compare_stages.read(results)
    (results / "stage0_metrics.json").unlink()
    with pytest.raises(
        UsageError, match="stage0_metrics.json: make it with run_all_stages.sh --stages 0"
    ):
        compare_stages.read(results)


def test_only_completed_runs_of_stages_are_compared(results):
    path = results / "stage2_metrics.json"
    record = read_json(path)
    write_json(path, record | {"status": "interrupted"})
    with pytest.raises(UsageError, match="stage2_metrics.json was not completed"):
        compare_stages.read(results)
    del record["stage"]
    write_json(path, record)
    with pytest.raises(UsageError, match="stage: Field required"):
        compare_stages.read(results)


def test_the_stages_measured_on_an_h100_show_their_symptoms():
    found = compare_stages.read(ROOT / "results/h100/stages")
    v1, v3 = found[0], next(stage for stage in found if stage.number == compare_stages.V3)
    said = {
        (stage.number, stage.fixed): compare_stages.findings(stage, v1, v3) for stage in found[1:]
    }
    symptoms = {
        1: "the loss starts at",
        2: "times stage 5's step",
        3: "their clock does not wait",
        4: "times stage 5's step",
        6: "never get a gradient",
    }
    assert all(symptom in said[number, False][0] for number, symptom in symptoms.items())
    assert [said[number, True] for number in symptoms] == [[]] * 5 and said[5, False] == []
