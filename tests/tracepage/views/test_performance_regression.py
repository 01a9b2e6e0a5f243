"""The verdict on two run records: what fails, what is not compared, and the exit codes."""

from pathlib import Path

from tests.conftest import ROOT
from tests.records import record
from tracepage.errors import UsageError
from tracepage.files import write_json
from tracepage.show.run_facts import ONE_PROCESS
from tracepage.views.performance_regression import Verdict, render_regression

import pytest

REGRESSION = ROOT / "version2_pytorch_fused/performance_regression_test.py"
FAST = dict(
    step_ms={"all": [6.0] * 20, "profiled": 0, "median": 6.0, "p20": 5.5, "p80": 6.5, "count": 20},
    version="v2",
)


def of_20_losses(run: dict) -> dict:
    losses = run["loss"]["all"]
    return run | {"loss": run["loss"] | {"all": losses + losses[-1:] * (20 - len(losses))}}


def verdict(
    tmp_path: Path, before: dict, after: dict, minimum: float = 1.0, tolerance: float = 1e-2
) -> Verdict:
    write_json(tmp_path / "before.json", of_20_losses(before))
    write_json(tmp_path / "after.json", of_20_losses(after))
    return render_regression(tmp_path / "before.json", tmp_path / "after.json", minimum, tolerance)


def shown(found: Verdict) -> str:
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


def test_the_largest_difference_of_losses_counts_where_inputs_are_equal(tmp_path):
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
