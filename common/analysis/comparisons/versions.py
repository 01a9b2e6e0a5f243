"""Two version folders held against each other: what was measured in them, and what differs in their code.

Measured: of all run records in the two folders the newest two that can be compared by the conditions of
`common.analysis.comparisons.regression` (same device, model, batch, sequence length, number format and PyTorch, completed, not wholly
under the profiler); and in the same way the newest two profiles, for the time and the launches of each span.

Code: the definitions of the two tiny_llama_vN.py, by `common.analysis.comparisons.source_diff`.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.comparisons import kernel_reduction, regression, source_diff
from common.analysis.output import tables
from common.analysis.profiles import run_record, step_profile
from common.analysis.profiles.run_record import SCHEMA as RUN_SCHEMA
from common.errors import UsageError
from common.files import read_json, writable_file, write_text

Table = Callable[[list[str], list[list[object]]], str]


class Version(NamedTuple):
    """A version's folder and script; `name` is that of its run records, such as v1."""

    name: str
    folder: Path
    script: Path


class Measured(NamedTuple):
    """A run record, and the file that holds it; `profile` where that is one with profiled steps."""

    path: Path
    run: dict[str, Any]
    profile: dict[str, Any] | None


Pair = tuple[Measured, Measured]


class Choice(NamedTuple):
    """The newest comparable pair; where there is none, the pair with the fewest differences, and these."""

    pair: Pair
    differences: list[str]


def analyze(baseline: Path, other: Path, output: Path | None) -> str:
    """Compares the versions in two folders; with `output` the same is written there as Markdown.

    Returns:
        The comparison for the terminal.

    Raises:
        UsageError: a folder holds no version or several, both hold the same one, or a file in them is damaged.
    """
    before, after = find(baseline, "--v1"), find(other, "--v2")
    if before.name == after.name:
        raise UsageError(f"--v1 {baseline} and --v2 {other} both hold {before.script.name}: give the folders of two versions")
    if output:
        writable_file(output, "--output")
    ours, theirs = measured(before), measured(after)
    runs = choose(ours, theirs, run_differences)
    profiles = choose(*([one for one in each if one.profile] for each in (ours, theirs)), profile_differences)
    changes = source_diff.compare(before.script, after.script)

    def sections(table: Table) -> str:
        parts = [
            f"# {before.name} and {after.name}",
            "## What was measured", *_runs(before, after, runs, table),
            "## Where a profiled step spends its time", *_spans(before, after, profiles, table),
            "## What changed in the code", *_code(before, after, changes, table),
        ]  # fmt: skip
        return "\n\n".join(part.strip() for part in parts)

    if output:
        write_text(output, sections(tables.markdown) + "\n")
    return sections(tables.text) + (f"\n\nwritten: {output}" if output else "")


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


# ------------------------------------------------------------------------------------------------------- what was measured


def measured(version: Version) -> list[Measured]:
    """The version's run records with a finished step: of *metrics*.json in its folder, and of profiles there or below."""
    found = []
    for path in (*version.folder.glob("*metrics*.json"), *version.folder.rglob("profile_*.json")):
        content = read_json(path)
        schema = content.get("schema") if isinstance(content, dict) else None
        run = content["run"] if schema == step_profile.SCHEMA else content
        profile = content if schema == step_profile.SCHEMA and content["profiled_steps"] else None
        if schema in (RUN_SCHEMA, step_profile.SCHEMA) and run["version"] == version.name and "median" in run["step_ms"]:
            found.append(Measured(path, run, profile))
    return found


def choose(ours: list[Measured], theirs: list[Measured], differences: Callable[[Pair], list[str]]) -> Choice | None:
    """Of all pairs the newest without differences, or the newest of those with the fewest. None: one of the two has nothing.

    A pair is as old as the older of its runs.
    """
    choices = [Choice((one, other), differences((one, other))) for one in ours for other in theirs]

    def fitness(choice: Choice) -> tuple:
        return -len(choice.differences), *sorted(one.run["date"] for one in choice.pair)

    return max(choices, key=fitness, default=None)


def run_differences(pair: Pair) -> list[str]:
    """Why the step times of the two cannot be compared."""
    unusable = [reason for path, run, _ in pair for reason in run_record.unusable(path, run)]
    return unusable + run_record.differences(*(run_record.conditions(one.run) for one in pair))


def profile_differences(pair: Pair) -> list[str]:
    """Why the two profiles cannot be compared."""
    conditions = [run_record.conditions(one.run) | {"attention only": one.profile["attention_only"]} for one in pair]
    return run_record.differences(*conditions)


def _runs(before: Version, after: Version, choice: Choice | None, table: Table) -> list[str]:
    if choice is None or choice.differences:
        return [_nothing(before, after, choice, "run record")]
    ours, theirs = (one.run for one in choice.pair)
    loss, steps = run_record.loss_difference(ours, theirs)
    rows = [*regression.rows(ours, theirs, steps)[1:], ["parameters", ours["parameters"], theirs["parameters"], None]]
    lessons = run_record.differences(run_record.training_inputs(ours), run_record.training_inputs(theirs))
    notes = [f"The losses say nothing: the runs differ in {'; '.join(lessons)}."] if lessons else []
    few = min(run["step_ms"]["count"] for run in (ours, theirs))
    if few < run_record.FEW_STEPS:
        notes.append(f"As few as {few} timed steps stand behind a median: raise --num-steps.")
    return [run_record.setting(ours), _taken(choice), table(_header(before, after), rows), *notes]


def _spans(before: Version, after: Version, choice: Choice | None, table: Table) -> list[str]:
    if choice is None or choice.differences:
        return [_nothing(before, after, choice, "profile")]
    reduction = kernel_reduction.compare(*(one.path for one in choice.pair))
    spans: dict[str, list[float]] = {}
    for row in reduction.by_span:
        figures = row.us_before / 1e3, row.us_after / 1e3, row.calls_before, row.calls_after
        spans[row.name] = [sum(pair) for pair in zip(spans.get(row.name, [0.0] * 4), figures, strict=True)]
    spans = dict(sorted(spans.items(), key=lambda item: -item[1][0]))
    spans["all"] = [sum(column) for column in zip(*spans.values(), strict=True)]
    rows = [[name, was, now, was / now if now else None, *calls] for name, (was, now, *calls) in spans.items()]
    names = before.name, after.name
    header = ["span", *(f"{name} ms" for name in names), " / ".join(names), *(f"{name} {reduction.counted}" for name in names)]
    return [
        f"A step under the profiler: self time in ms, and {reduction.counted}.",
        _taken(choice),
        table(header, rows),
        *reduction.notes,
    ]


def _header(before: Version, after: Version) -> list[str]:
    return ["quantity", before.name, after.name, f"{before.name} / {after.name}"]


def _taken(choice: Choice) -> str:
    """Which files were taken, and what wrote them."""
    return "\n".join(f"- {one.run['version']}: {one.path}, from {run_record.origin(one.run)}" for one in choice.pair)


def _nothing(before: Version, after: Version, choice: Choice | None, what: str) -> str:
    """Why there is nothing to show, and what to run."""
    if choice:
        paths = " and ".join(str(one.path) for one in choice.pair)
        reason = f"No two {what}s can be compared. The nearest are {paths}: {'; '.join(choice.differences)}."
    else:
        reason = f"There is no {what} of {before.name} in {before.folder}, or none of {after.name} in {after.folder}."
    commands = [
        f"(cd {shlex.quote(str(version.folder))} && python {version.script.name} --num-steps 100 --enable-pytorch-profiler)"
        for version in (before, after)
    ]
    return "\n".join([f"{reason} Run", "", *(f"    {command}" for command in commands)])


def _code(before: Version, after: Version, changes: list[source_diff.Change], table: Table) -> list[str]:
    same = [change.name for change in changes if change.kind == "same"]
    others = [change for change in changes if change.kind != "same"]
    header = ["definition", "change", f"lines in {before.name}", f"lines in {after.name}", "added", "removed"]
    total = ["all of these", "", *(sum(change[i] for change in others) for i in range(2, 6))]
    return [
        f"{before.script} and {after.script}: of {len(changes)} definitions {len(same)} are the same and {len(others)} are not.",
        table(header, [*map(list, others), total]),
        f"The same in both: {', '.join(same) or 'none'}.",
    ]
