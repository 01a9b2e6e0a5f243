"""The folders of two versions: their newest runs and profiles that can be compared.

Runs can be compared where a difference can come from the code: same device, model, batch, sequence
length, number format and PyTorch.
"""

import itertools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import TimedRun
from tracepage.show import run_facts, run_pair
from tracepage.show.report import Report
from tracepage.show.run_pair import RunPair
from tracepage.terminal import format_number
from tracepage.views import launch_changes


class Candidate(NamedTuple):
    """A run that finished a step: its record, or a profile, which holds one."""

    path: Path
    run: TimedRun
    profiled: bool  # whether it is a profile of whole steps


def render_versions(baseline: Path, other: Path) -> Report:
    """The newest runs of two versions' folders, and the newest profiles, that can be compared.

    Where no two can be compared, there are no numbers; the report names what differs between the
    newest two.
    """
    first = version_script(baseline, "--v1")
    second = version_script(other, "--v2")
    if first.name == second.name:
        raise UsageError(
            f"--v1 {baseline} and --v2 {other} both hold {first.name}: "
            "give the folders of two versions"
        )
    ours = measured(first)
    theirs = measured(second)
    names = [script.stem.removeprefix("tiny_llama_") for script in (first, second)]
    report = Report(" and ".join(names))
    report.section("What was measured")
    pairs = list(itertools.product(ours, theirs))
    newest = _add_newest(report, run_pair.add_runs, pairs)
    if newest:
        report.text(_medians(_alike(ours, newest), _alike(theirs, newest)))
    report.section("Where a profiled step spends its time")
    profiled = [(one, other) for one, other in pairs if one.profiled and other.profiled]
    _add_newest(report, add_spans, profiled)
    report.section("What changed in the code")
    report.commands([f"git diff --no-index {shlex.join([str(first), str(second)])}"])
    return report


def version_script(folder: Path, flag: str) -> Path:
    """The one tiny_llama_vN.py in a folder."""
    scripts = sorted(folder.glob("tiny_llama_v*.py"))
    if len(scripts) != 1:
        names = " and ".join(script.name for script in scripts) or "no tiny_llama_vN.py"
        raise UsageError(
            f"{flag}: {folder} holds {names}: "
            "give a version's folder, such as ../version1_pytorch_baseline"
        )
    return scripts[0]


def measured(script: Path) -> list[Candidate]:
    """The version's runs: of *metrics*.json in its folder, and of profiles there or below."""
    paths = [*script.parent.glob("*metrics*.json"), *script.parent.rglob("profile_*.json")]
    candidates = filter(None, map(read_candidate, paths))
    return [run for run in candidates if f"tiny_llama_{run.run['version']}" == script.stem]


def read_candidate(path: Path) -> Candidate | None:
    """A run record or a profile; None if the file is neither, or has no finished step."""
    content = files.read_json(path)
    profiled = False
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema == step_profile.SCHEMA:
        profile = files.check(path, content, step_profile.Profiled)
        content = profile["run"]
        profiled = bool(profile["profiled_steps"]) and not profile["attention_only"]
    elif schema != run_record.SCHEMA:
        return None
    run = run_record.check(path, files.check(path, content, run_record.RunRecord))
    return Candidate(path, run, profiled) if run_record.finished(run) else None


def _add_newest(
    report: Report,
    add: Callable[[Report, RunPair], None],
    pairs: list[tuple[Candidate, Candidate]],
) -> Candidate | None:
    """Adds the newest two runs that can be compared and returns one, or adds why the newest two
    cannot; a pair is as old as the older of its runs.
    """
    pairs.sort(key=lambda pair: min(side.run["date"] for side in pair), reverse=True)
    for first, second in pairs:
        if not _differences(first, second):
            add(report, {side.run["version"]: (side.path, side.run) for side in (first, second)})
            return first
    why = ""
    if pairs:
        first, second = pairs[0]
        reasons = "; ".join(_differences(first, second))
        why = f"The newest, {first.path} and {second.path}, differ: {reasons}. "
    report.text(
        f"No two can be compared. {why}"
        "Run both with the same flags and `--enable-pytorch-profiler`."
    )
    return None


def _alike(candidates: Sequence[Candidate], newest: Candidate) -> list[float]:
    """Median step times of the runs that can be compared; a profile's run counts once."""
    times = {
        candidate.run["date"]: candidate.run["step_ms"]["median"]
        for candidate in candidates
        if not _differences(candidate, newest)
    }
    return list(times.values())


def _medians(ours: list[float], theirs: list[float]) -> str:
    """The medians of the processes of both sides, or that one process on a side does not tell."""
    if 1 in (len(ours), len(theirs)):
        return run_facts.ONE_PROCESS
    sides = " and ".join(
        f"{format_number(median(times))} ms "
        f"({format_number(min(times))} to {format_number(max(times))})"
        for times in (ours, theirs)
    )
    faster = median(ours) / median(theirs)
    return (
        f"Medians of {len(ours)} and {len(theirs)} processes: {sides}; {faster:.3g} times as fast."
    )


def _differences(ours: Candidate, theirs: Candidate) -> list[str]:
    """Why the step times of the two cannot be compared."""
    return run_record.incomparable((ours.path, ours.run), (theirs.path, theirs.run))


def add_spans(report: Report, pair: RunPair) -> None:
    """Adds the time and the launches of each span of a profiled step."""
    before, after = (path for path, _ in pair.values())
    reduction = launch_changes.compare_launches(load_kernels.load(before), load_kernels.load(after))
    spans = reduction.by("span").sort_values("us_before", ascending=False)
    sums = spans[["span", *launch_changes.NUMBERS]].values.tolist()
    sums.append(["all", *reduction.launches[launch_changes.NUMBERS].sum()])
    rows = []
    for span, calls_before, calls_after, us_before, us_after in sums:
        ratio = us_before / us_after if us_after else None
        rows.append([span, us_before / 1e3, us_after / 1e3, ratio, calls_before, calls_after])
    report.text(reduction.conditions[0])
    run_pair.add_origins(report, pair)
    report.text(f"A step under the profiler: self time in ms, and {reduction.counted}.")
    times = [f"{name} ms" for name in pair]
    counts = [f"{name} {reduction.counted}" for name in pair]
    report.table(["span", *times, " / ".join(pair), *counts], rows)
    report.text(*reduction.notes)
