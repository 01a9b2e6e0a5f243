"""Two version folders compared: what was measured in them, and what differs in their code.

Measured: the newest two run records in the two folders that can be compared by `run_record.conditions` (same device, model, batch
size, sequence length, number format and PyTorch; completed, not wholly under the profiler); and the newest two profiles under the
same conditions as these runs, for the time and the launches of each span. Where there are no such two, no numbers are shown; the
report names what differs between the nearest two.

Code: the definitions of the two tiny_llama_vN.py, by `common.analysis.comparisons.source_diff`.
"""

import itertools
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import files
from common.analysis.comparisons import kernel_reduction, regression, source_diff
from common.analysis.output import run_facts
from common.analysis.output.report import Report
from common.errors import UsageError
from common.progress import progress
from common.records import run_record, step_profile


class Version(NamedTuple):
    """A version's folder and script; `name` is that of its run records, such as v1."""

    name: str
    folder: Path
    script: Path


class Measured(NamedTuple):
    """The part of a run that the choice needs, so that the files of many runs need not stay in memory.

    Attributes:
        path: the run's record, or a profile, which holds one.
        date: when the run began.
        conditions: of `run_record.conditions`.
        unusable: why its step times cannot be used.
        attention_only: whether the profile is of the attention alone; None if there is none, or it has no profiled step.
    """

    path: Path
    date: str
    conditions: dict[str, Any]
    unusable: list[str]
    attention_only: bool | None

    @property
    def run(self) -> dict[str, Any]:
        """The record, read again."""
        content = files.read_json(self.path)
        return content["run"] if content["schema"] == step_profile.SCHEMA else content


Pair = tuple[Measured, Measured]


class Choice(NamedTuple):
    """The newest comparable pair; where there is none, the pair with the fewest differences, and these."""

    pair: Pair
    differences: list[str]


def analyze(baseline: Path, other: Path, output: Path | None) -> str:
    """Compares the versions in two folders; with `output` the report is written there as Markdown.

    Returns:
        The report for the terminal.

    Raises:
        UsageError: a folder holds no version or several, both hold the same one, or a file in them is damaged.
    """
    before, after = find(baseline, "--v1"), find(other, "--v2")
    if before.name == after.name:
        raise UsageError(f"--v1 {baseline} and --v2 {other} both hold {before.script.name}: give the folders of two versions")
    if output:
        files.writable_file(output, "--output")
    report = compare(before, after)
    if output:
        files.write_text(output, report.markdown())
    return report.terminal() + (f"\n\nwritten: {output}" if output else "")


def find(folder: Path, flag: str) -> Version:
    """The version in a folder, by its tiny_llama_vN.py.

    Raises:
        UsageError: there is none, or more than one.
    """
    scripts = sorted(folder.glob("tiny_llama_v*.py"))
    if len(scripts) != 1:
        found = f"holds {' and '.join(script.name for script in scripts)}" if scripts else "holds no tiny_llama_vN.py"
        raise UsageError(f"{flag}: {folder} {found}: give a version's folder, such as ../version1_pytorch_baseline")
    return Version(scripts[0].stem.removeprefix("tiny_llama_"), folder, scripts[0])


def compare(before: Version, after: Version) -> Report:
    """The report on two versions.

    Raises:
        UsageError: a file in their folders is damaged.
    """
    ours, theirs = newest(before), newest(after)
    runs = choose(ours, theirs, run_differences)
    shown = runs.pair[0].conditions if runs and not runs.differences else None

    def profile_differences(pair: Pair) -> list[str]:
        first, second = (one.conditions | {"attention only": one.attention_only} for one in pair)
        return run_record.differences(first, second) or run_record.differences(shown or first, first)

    profiles = choose(*([one for one in each if one.attention_only is not None] for each in (ours, theirs)), profile_differences)
    report = Report(f"{before.name} and {after.name}")
    report.section("What was measured")
    if _comparable(report, before, after, runs, "run records"):
        _add_runs(report, runs.pair)
    report.section("Where a profiled step spends its time")
    if _comparable(report, before, after, profiles, "profiles" + " of the shape above" * bool(shown)):
        _add_spans(report, profiles.pair, [before.name, after.name])
    report.section("What changed in the code")
    _add_code(report, before, after)
    return report


# ------------------------------------------------------------------------------------------------------- what was measured


def newest(version: Version) -> list[Measured]:
    """The newest run of each kind. Runs of one kind differ from any run of another version in the same."""
    found: dict[str, Measured] = {}
    with progress(f"reading the runs in {version.folder}") as note:
        for number, one in enumerate(measured(version), 1):
            note(f"{number:,} runs")
            kind = json.dumps([one.conditions, len(one.unusable), one.attention_only])
            if kind not in found or one.date > found[kind].date:
                found[kind] = one
    return list(found.values())


def measured(version: Version) -> Iterator[Measured]:
    """The version's run records with a finished step: of *metrics*.json in its folder, and of profiles there or below."""
    for path in itertools.chain(version.folder.glob("*metrics*.json"), version.folder.rglob("profile_*.json")):
        content = files.read_json(path)
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema in (run_record.SCHEMA, step_profile.SCHEMA):
            is_profile = schema == step_profile.SCHEMA
            files.check(path, content, step_profile.Profiled if is_profile else run_record.RunRecord)
            run = run_record.check(path, content["run"] if is_profile else content)
            if run["version"] == version.name and run["step_ms"]["all"]:
                attention_only = content["attention_only"] if is_profile and content["profiled_steps"] else None
                yield Measured(path, run["date"], run_record.conditions(run), run_record.unusable(path, run), attention_only)


def choose(ours: list[Measured], theirs: list[Measured], differences: Callable[[Pair], list[str]]) -> Choice | None:
    """The newest pair without differences, else the newest of those with the fewest. None: one of the two has nothing.

    A pair is as old as the older of its runs.
    """
    choices = [Choice((one, other), differences((one, other))) for one in ours for other in theirs]

    def fitness(choice: Choice) -> tuple:
        return -len(choice.differences), *sorted(one.date for one in choice.pair)

    return max(choices, key=fitness, default=None)


def run_differences(pair: Pair) -> list[str]:
    """Why the step times of the two cannot be compared."""
    unusable = [reason for one in pair for reason in one.unusable]
    return unusable + run_record.differences(*(one.conditions for one in pair))


def _comparable(report: Report, before: Version, after: Version, choice: Choice | None, what: str) -> bool:
    """Adds on what the two ran and their files; or, where they cannot be compared, why, and what to run."""
    if choice and not choice.differences:
        runs = [one.run for one in choice.pair]
        report.text(run_facts.describe(runs[0]))
        report.facts([
            (run["version"], f"{one.path}, from {run_facts.origin(run)}") for one, run in zip(choice.pair, runs, strict=True)
        ])  # fmt: skip
        return True
    reason = f"There are no {what} of {before.name} in {before.folder}, or none of {after.name} in {after.folder}."
    if choice:
        paths = " and ".join(str(one.path) for one in choice.pair)
        reason = f"No two {what} can be compared. The nearest are {paths}, which differ: {'; '.join(choice.differences)}."
    report.text(f"{reason} Run")
    report.commands([
        f"(cd {shlex.quote(str(version.folder))} && python {version.script.name} --num-steps 100 --enable-pytorch-profiler)"
        for version in (before, after)
    ])  # fmt: skip
    return False


def _add_runs(report: Report, pair: Pair) -> None:
    ours, theirs = (one.run for one in pair)
    _, steps = run_record.loss_difference(ours, theirs)
    names = ours["version"], theirs["version"]
    report.table(["quantity", *names, " / ".join(names)], regression.rows(ours, theirs, steps))
    if differing := run_record.differences(run_record.training_inputs(ours), run_record.training_inputs(theirs)):
        report.text(f"The losses cannot be compared: the runs differ in {'; '.join(differing)}.")
    report.text(*run_facts.doubts(dict(zip(names, (ours, theirs), strict=True))))


def _add_spans(report: Report, pair: Pair, names: list[str]) -> None:
    reduction = kernel_reduction.compare(*(one.path for one in pair))
    spans = kernel_reduction.grouped(reduction.by_span, lambda row: (row.name, ""))
    rows = [
        [row.name, row.us_before / 1e3, row.us_after / 1e3, row.us_before / row.us_after if row.us_after else None,
         row.calls_before, row.calls_after]
        for row in [*sorted(spans, key=lambda row: -row.us_before), reduction.total]
    ]  # fmt: skip
    report.text(f"A step under the profiler: self time in ms, and {reduction.counted}.")
    counts = [f"{name} {reduction.counted}" for name in names]
    report.table(["span", *(f"{name} ms" for name in names), " / ".join(names), *counts], rows)
    report.text(*(f"{note[0].upper()}{note[1:]}." for note in reduction.notes))


def _add_code(report: Report, before: Version, after: Version) -> None:
    changes = source_diff.compare(before.script, after.script)
    same = [change.name for change in changes if change.kind == "same"]
    others = [change for change in changes if change.kind != "same"]
    report.text(
        f"{before.script} and {after.script}: of {len(changes)} definitions {len(same)} are the same and {len(others)} are not."
    )
    header = ["definition", "change", f"lines in {before.name}", f"lines in {after.name}", "added", "removed"]
    report.table(header, [*others, ["all of these", "", *(sum(change[i] for change in others) for i in range(2, 6))]])
    report.text(f"The same in both: {', '.join(same) or 'none'}.")
