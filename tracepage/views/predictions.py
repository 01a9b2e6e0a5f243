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


def note_prediction(
    profile_data: Path, change: str, expected: float, version: str, path: Path
) -> Report:
    """Writes a guess, that the step gets `expected` times as fast, into `path`, in place of an
    earlier one of the same change.
    """
    profile, step = bottlenecks.find_step(profile_data, version)
    bounds = {target["name"]: target["bound"] for target in targets(step)}
    offered = [name for name, target in CHANGES.items() if target in bounds]
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
        "profiled": step.profile["run"]["date"],
        "change": change,
        "expected": expected,
        "bound": bounds[CHANGES[change]],
    }
    files.writable_file(path, "--file")
    guesses = files.read(path, Predictions)["predictions"] if path.exists() else []
    guesses = [row for row in guesses if _key(row) != _key(guess)]
    content = Predictions(schema="tiny-llama-predictions/1", predictions=[*guesses, guess])
    files.write_measurement(path, content, "--file")
    report = Report(f"A prediction for {change}")
    report.facts([*_sides(guess), ("written", str(path))])
    return report


def _key(guess: Prediction) -> tuple[str, str]:
    return guess["profiled"], guess["change"]


def _sides(guess: Prediction) -> list[tuple[str, str]]:
    bound = "not known: the profile has no ceiling for it"
    if guess["bound"]:
        bound = f"at most {guess['bound']:.2f}x"
    return [("your guess", f"{guess['expected']:.2f}x"), ("the bound", bound)]


def check_prediction(before: Path, after: Path, change: str | None, path: Path) -> Report:
    """The guess, its bound and the measurement. UsageError: the runs differ in more than the
    change.
    """
    paths = step_profile.find(before), step_profile.find(after)
    ours = step_profile.read(paths[0])["run"]
    theirs = step_profile.read(paths[1])["run"]
    guesses = {
        guess["change"]: guess
        for guess in files.read(path, Predictions)["predictions"]
        if guess["profiled"] == ours["date"]
    }
    if change is None and len(guesses) == 1:
        change = next(iter(guesses))
    if change not in guesses:
        named = f"guesses for {', '.join(guesses)}" if guesses else "no guess"
        raise UsageError(
            f"{path} holds, for the profile {paths[0]}, {named}: make one with --expect, or choose "
            "it with --change"
        )
    varied = "precision compute" if change == "use-amp" else ""
    conditions = run_record.conditions(ours, varied), run_record.conditions(theirs, varied)
    run_record.require_equal(paths, conditions, change)
    guess = guesses[change]
    old = ours["step_ms"]
    new = theirs["step_ms"]
    gain = old["median"] / new["median"]
    low = old["p20"] / new["p80"]
    high = old["p80"] / new["p20"]
    report = Report(f"The prediction for {change}")
    measured = f"{gain:.2f}x, p20 to p80: {low:.2f}x to {high:.2f}x"
    report.facts([*_sides(guess), ("measured", measured)])
    if guess["bound"] and low > guess["bound"]:
        report.text(
            "The step gained more than the bound: the runs differ in more than this change, or the "
            "machine does."
        )
    report.text(*run_facts.doubts({"before": ours, "after": theirs}))
    return report
