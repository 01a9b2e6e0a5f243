"""What a change of Version 1 gains: a guess beside its bound, and after the change both beside the
measurement.

The bound is that of the change's target in the bottleneck report. The measurement is the median
step without the profiler.
"""

from pathlib import Path

from tracepage import files
from tracepage.cost.optimization_targets import CHANGES, targets
from tracepage.errors import UsageError
from tracepage.records import run_record, step_profile
from tracepage.records.study_files import Prediction, Predictions
from tracepage.show import run_facts
from tracepage.show.report import Report
from tracepage.views import bottlenecks


def predict(profile_data: Path, change: str, expected: float, version: str, path: Path) -> Report:
    """Writes a guess, that the step gets `expected` times as fast, into `path`, in place of an
    earlier one of the same change.
    """
    profile, step = bottlenecks.find_step(profile_data, version)
    found = {target["name"]: target for target in targets(step)}
    profiled = step.profile["run"]["date"]
    offered = [name for name, target in CHANGES.items() if target in found]
    if change not in offered:
        raise UsageError(
            f"--change {change}: {profile} has no target for it; there are {', '.join(offered)}"
        )
    if not 0 < expected < float("inf"):
        raise UsageError(
            f"--expect {expected:g}: say how many times as fast the step will be, such as 1.3"
        )
    guess: Prediction = {
        "profile": str(profile),
        "profiled": profiled,
        "change": change,
        "expected": expected,
        "bound": found[CHANGES[change]]["bound"],
    }
    files.writable_file(path, "--file")
    held = files.read(path, Predictions)["predictions"] if path.exists() else []
    kept = [row for row in held if (row["profiled"], row["change"]) != (profiled, change)]
    files.write_measurement(
        path, Predictions(schema="tiny-llama-predictions/1", predictions=[*kept, guess]), "--file"
    )
    report = Report(f"A prediction for {change}")
    report.facts([*_sides(guess), ("written", str(path))])
    return report


def _sides(guess: Prediction) -> list[tuple[str, str]]:
    bound = (
        f"at most {guess['bound']:.2f}x"
        if guess["bound"]
        else "not known: the profile has no ceiling for it"
    )
    return [("your guess", f"{guess['expected']:.2f}x"), ("the bound", bound)]


def check(before: Path, after: Path, change: str | None, path: Path) -> Report:
    """The guess, its bound and the measurement. UsageError: the runs differ in more than the
    change.
    """
    paths = step_profile.find(before), step_profile.find(after)
    ours, theirs = (step_profile.read(each)["run"] for each in paths)
    guesses = {
        row["change"]: row
        for row in files.read(path, Predictions)["predictions"]
        if row["profiled"] == ours["date"]
    }
    wanted = change or (next(iter(guesses)) if len(guesses) == 1 else "")
    if wanted not in guesses:
        held = f"guesses for {', '.join(guesses)}" if guesses else "no guess"
        raise UsageError(
            f"{path} holds, for the profile {paths[0]}, {held}: make one with --expect, or choose it with --change"
        )
    varied = {"precision compute": None} if wanted == "use-amp" else {}
    alike = run_record.conditions(ours) | varied, run_record.conditions(theirs) | varied
    run_record.require_equal(paths, alike, wanted)
    guess = guesses[wanted]
    old = ours["step_ms"]
    new = theirs["step_ms"]
    low = old["p20"] / new["p80"]
    high = old["p80"] / new["p20"]
    report = Report(f"The prediction for {wanted}")
    report.facts(
        [
            *_sides(guess),
            (
                "measured",
                f"{old['median'] / new['median']:.2f}x, p20 to p80: {low:.2f}x to {high:.2f}x",
            ),
        ]
    )
    if guess["bound"] and low > guess["bound"]:
        report.text(
            "The step gained more than the bound: the runs differ in more than this change, or the machine does."
        )
    report.text(*run_facts.doubts({"before": ours, "after": theirs}))
    return report
