"""Predictions: a guess stands beside its bound, and after the change both beside the measurement."""

from tests.conftest import V1
from tests.small_traces import write_profile
from tracepage.cost import optimization_targets
from tracepage.files import read, read_json, write_json
from tracepage.records import step_profile
from tracepage.records.study_files import Predictions

import pytest

SCRIPT = V1 / "predict.py"


@pytest.fixture
def faster(cpu_profile, cpu_trace, tmp_path):
    """faster(name, **changes): a profile whose steps take a quarter less, in a later run."""

    def write(name: str, **changes):
        times = {
            "all": [6.75] * 9,
            "profiled": 0,
            "median": 6.75,
            "p20": 6.0,
            "p80": 7.5,
            "count": 9,
        }
        write_profile(
            tmp_path / name,
            cpu_trace,
            version="v2",
            date="2999-01-01T00:00:00Z",
            step_ms=times,
            **changes,
        )
        return tmp_path / name

    return write


def test_a_guess_is_written_beside_the_bound_that_the_report_has(execute, cpu_profile, tmp_path):
    targets = optimization_targets.targets(
        optimization_targets.mean_step(step_profile.read(cpu_profile))
    )
    bounds = {target["name"]: target["bound"] for target in targets}
    for change, guess in (("torch-compile", 1.3), ("use-amp", 2), ("torch-compile", 1.2)):
        shown = execute(SCRIPT, cpu_profile, "--change", change, "--expect", guess).out
        assert f"your guess  {guess:.2f}x" in shown
    rows = read(tmp_path / "predictions.json", Predictions)["predictions"]
    assert [(row["change"], row["expected"]) for row in rows] == [
        ("use-amp", 2),
        ("torch-compile", 1.2),
    ]
    assert [row["bound"] for row in rows] == [None, bounds["elementwise fusion"]]
    cpu_profile.write_text(cpu_profile.read_text().replace('"date": "2026', '"date": "2027'))
    execute(SCRIPT, cpu_profile, "--change", "use-amp", "--expect", 2)
    assert len(read_json(tmp_path / "predictions.json")["predictions"]) == 3, (
        "each profile has its own guess"
    )


def test_the_check_has_guess_bound_and_measurement(execute, cpu_profile, faster, tmp_path):
    execute(
        SCRIPT, cpu_profile, "--change", "flash-attention", "--expect", "1.5", "--file", "mine.json"
    )
    mine = read_json(tmp_path / "mine.json")
    mine["predictions"][0]["bound"] = 1.1
    write_json(tmp_path / "mine.json", mine)
    after = faster("profile_3.json")
    shown = execute(SCRIPT, "--check", cpu_profile, after, "--file", "mine.json").out
    assert (
        "your guess  1.50x\nthe bound   at most 1.10x\nmeasured    1.33x, p20 to p80: 1.20x to 1.50x\n"
        in shown
    )
    assert "gained more than the bound" in shown


def test_a_change_of_precision_is_compared_where_it_is_the_change(
    execute, refused, cpu_profile, faster
):
    after = faster("profile_3.json", precision={"compute": "bf16", "tf32": False})
    execute(SCRIPT, cpu_profile, "--change", "use-amp", "--expect", "2")
    assert (
        "not known: the profile has no ceiling for it"
        in execute(SCRIPT, "--check", cpu_profile, after).out
    )
    execute(SCRIPT, cpu_profile, "--change", "qkv-fusion", "--expect", "1.1")
    assert "differ in more than qkv-fusion: precision compute" in refused(
        SCRIPT, "--check", cpu_profile, after, "--change", "qkv-fusion"
    )
    assert "holds, for the profile" in (said := refused(SCRIPT, "--check", cpu_profile, after))
    assert "guesses for use-amp, qkv-fusion: make one with --expect" in said
    assert "no guess: make one with --expect" in refused(SCRIPT, "--check", after, cpu_profile)
