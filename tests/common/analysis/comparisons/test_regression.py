"""Regression test: speed-up and loss of two real runs, and a refusal for each way in which two runs cannot be compared."""

import json
from pathlib import Path

from common.analysis.comparisons import regression
from common.errors import UsageError
from common.files import write_json
from tests.conftest import ROOT, TINY, V1
from tests.records import record

import pytest

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "performance_regression_test.py"


def compare(tmp_path: Path, before: dict, after: dict, minimum: float = 1.0, tolerance: float = 1e-2) -> regression.Verdict:
    write_json(tmp_path / "before.json", before)
    write_json(tmp_path / "after.json", after)
    return regression.compare(tmp_path / "before.json", tmp_path / "after.json", minimum, tolerance)


def shown(verdict: regression.Verdict) -> str:
    """The terminal text on one line."""
    return " ".join(verdict.report.terminal().split())


FAST = dict(step_ms={"all": [6.0] * 20, "profiled": 0, "median": 6.0, "p20": 5.5, "p80": 6.5, "count": 20}, version="v2")


def test_speedup_with_its_range_and_memory(tmp_path):
    verdict = compare(tmp_path, record(), record(**FAST, memory__peak_mib=80.0), minimum=1.9)
    assert "Speed-up 2, from 1.69 to 2.36" in shown(verdict)  # 11 / 6.5 and 13 / 5.5
    row = next(line for line in verdict.report.terminal().splitlines() if line.startswith("peak MiB"))
    assert row.split()[-3:] == ["100", "80", "1.25"]
    assert not verdict.failures and "overlap" not in shown(verdict)


def test_too_slow_is_a_failure_and_equal_is_not(tmp_path):
    assert compare(tmp_path, record(), record(**FAST), minimum=2.5).failures == ["the speed-up 2 is below 2.5"]
    assert compare(tmp_path, record(), record(**FAST), minimum=float("nan")).failures
    same = compare(tmp_path, record(), record())
    assert not same.failures and "overlap" in shown(same)
    assert compare(tmp_path, record(**FAST), record()).failures


def test_the_largest_difference_of_the_loss_curves_counts(tmp_path):
    other = record(**FAST, loss__all=[7.0, 6.03, 5.0, 4.0])
    verdict = compare(tmp_path, record(), other)
    assert "largest difference 0.03 nats over 3 steps" in shown(verdict)
    assert verdict.failures == ["the loss curves differ by 0.03, more than 0.01"]
    assert not compare(tmp_path, record(), other, tolerance=0.1).failures


def test_a_loss_that_is_no_number_is_refused(tmp_path):
    losses = [2.0] * 10
    losses[5] = float("nan")
    with pytest.raises(UsageError, match=r"after.json: loss.all.5"):
        compare(tmp_path, record(loss__all=[2.0] * 10), record(loss__all=losses))


def test_noisy_step_times_are_named(tmp_path):
    assert "30 % of the median for current (33 %)" in shown(compare(tmp_path, record(), record(step_ms__p80=15.0)))


@pytest.mark.parametrize("change", [{"training__seed": 1}, {"data__sha256": "cd" * 32}, {"training__learning_rate": 1e-2}])
def test_losses_of_other_data_are_not_compared(tmp_path, change):
    verdict = compare(tmp_path, record(), record(**FAST, **change, loss__all=[1.0, 1.0, 1.0]))
    assert not verdict.failures and "Loss curves: not compared, they differ in" in shown(verdict)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device__name": "Another GPU"}, "device name (A GPU and Another GPU)"),
        ({"training__batch_size": 4}, "batch size (8 and 4)"),
        ({"training__sequence_length": 64}, "sequence length (128 and 64)"),
        ({"model__num_layers": 8}, "model num_layers (4 and 8)"),
        ({"precision__compute": "bf16"}, "precision compute (fp32 and bf16)"),
        ({"precision__tf32": True}, "precision tf32 (False and True)"),
        ({"environment__torch": "2.14.0"}, "torch (2.13.0 and 2.14.0)"),
        ({"status": "interrupted"}, "after.json was not completed (interrupted)"),
        ({"step_ms__profiled": 20}, "all steps of after.json ran under the profiler"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, change, message):
    with pytest.raises(UsageError) as caught:
        compare(tmp_path, record(), record(**change))
    assert message in str(caught.value)


def test_every_reason_is_named(tmp_path):
    with pytest.raises(UsageError) as caught:
        compare(tmp_path, record(status="interrupted"), record(training__batch_size=4, device__name="B"))
    assert all(part in str(caught.value) for part in ("before.json was not completed", "batch size (8 and 4)", "device name"))


def test_two_real_runs(run_script, tmp_path):
    quick = (*TINY, "--data", "synthetic")
    run_script(V1 / "tiny_llama_v1.py", *quick, "--num-steps", "12", "--metrics-out", "v1.json")
    run_script(V2 / "tiny_llama_v2.py", *quick, "--num-steps", "8", "--metrics-out", "v2.json")
    arguments = ("--baseline-results", "v1.json", "--current-results", "v2.json", "--min-speedup")
    assert "FAIL: the speed-up" in run_script(SCRIPT, *arguments, "1000", check=1).stdout
    verdict = regression.compare(tmp_path / "v1.json", tmp_path / "v2.json", 0.001, 1e-4)
    assert "over 8 steps" in shown(verdict) and not verdict.failures
    losses = [json.loads((tmp_path / name).read_text())["loss"]["all"] for name in ("v1.json", "v2.json")]
    assert losses[0][:8] == pytest.approx(losses[1], abs=1e-5)  # the batches do not depend on the number of steps


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot read"),
        ("", "is empty"),
        ("{", "is not JSON"),
        ('{"schema": "tiny-llama-profile/1"}', "not a file of schema"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, content, message):
    write_json(tmp_path / "good.json", record())
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        regression.compare(tmp_path / "good.json", tmp_path / "bad.json", 1.0, 1e-2)


def test_exit_codes_of_the_script(run_script, tmp_path):
    write_json(tmp_path / "before.json", record())
    write_json(tmp_path / "after.json", record(**FAST))
    arguments = ("--baseline-results", "before.json", "--current-results")
    assert run_script(SCRIPT, *arguments, "after.json", "--min-speedup", "1.3").stdout.splitlines()[-1].startswith("PASS")
    refused = run_script(SCRIPT, *arguments, "missing.json", check=2)
    assert refused.stderr.startswith("error: cannot read missing.json") and refused.stderr.count("\n") == 1
