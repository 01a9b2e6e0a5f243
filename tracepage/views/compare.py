"""Compares two runs. Each analysis below is one report, made of the sections that follow it.

    regression         two run records: is the second run as fast as it should be, and does it learn the same?
    kernel_reduction   two profiles: which launches are gone?
    versions           the folders of two versions: their newest runs and profiles that can be compared
    fusion_report      all that was measured of a fused version and its baseline, as Markdown and as one HTML page

Runs are compared where a difference can come from the code: same device, model, batch, sequence
length, number format and PyTorch. The speed-up is median(baseline) / median(current) of ms per
step. Losses are compared step by step where data, seed and learning rate are the same.
"""

import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import TimedRun
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.views import ablation_effects, launch_changes

# two files and their records, under the names by which tables show them
Runs = Mapping[str, tuple[Path, TimedRun]]

TOP = 10  # names in each table of the fusion report


class Verdict(NamedTuple):
    """The comparison, and why it is a regression (empty: it is none)."""

    report: Report
    failures: list[str]


def regression(baseline: Path, current: Path, min_speedup: float, loss_tolerance: float) -> Verdict:
    """Compares two run records. A smaller speed-up, or a larger difference of the loss curves in
    nats, is a regression.
    """
    before = run_record.read(baseline)
    after = run_record.read(current)
    reasons = [
        reason
        for path, run in ((baseline, before), (current, after))
        for reason in run_record.unusable(path, run)
    ]
    reasons += run_record.differences(run_record.conditions(before), run_record.conditions(after))
    for path, run in ((baseline, before), (current, after)):
        losses = len(run["loss"]["all"])
        steps = len(run["step_ms"]["all"])
        if losses != steps:
            reasons.append(f"{path.name} has losses of {losses} steps, and {steps} were timed")
    if reasons or not (run_record.finished(before) and run_record.finished(after)):
        raise UsageError(
            f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; measure both again, alike"
        )
    speedup = before["step_ms"]["median"] / after["step_ms"]["median"]
    loss, _ = run_record.loss_difference(before, after)
    failures = (
        [] if speedup >= min_speedup else [f"the speed-up {speedup:.6g} is below {min_speedup:g}"]
    )
    if not _other_inputs(before, after) and not loss <= loss_tolerance:
        failures.append(f"the loss curves differ by {loss:.2g}, more than {loss_tolerance:g}")
    report = Report("Regression test")
    add_runs(report, {"baseline": (baseline, before), "current": (current, after)})
    report.text(f"Speed-up {speedup:.3g}. {run_facts.ONE_PROCESS}")
    report.text(
        f"FAIL: {'; '.join(failures)}"
        if failures
        else f"PASS: the speed-up is at least {min_speedup:g}"
    )
    return Verdict(report, failures)


def add_runs(report: Report, runs: Runs) -> None:
    """Adds what both ran on, their files, the numbers of the runs as a whole, their losses, and
    reasons to doubt their times.
    """
    (_, before), (_, after) = runs.values()
    report.text(run_facts.describe(before))
    report.facts(
        [(name, f"{path}, from {run_facts.origin(run)}") for name, (path, run) in runs.items()]
    )
    was, now = (dict[str, Any](run_facts.columns(run) | run["step_ms"]) for run in (before, after))
    rows = [
        [name, was[name], now[name], was[name] / now[name]]
        for name in ("ms/step", "p20", "p80", "peak MiB")
    ]
    report.table(
        ["quantity", *runs, " / ".join(runs)],
        [*rows, ["tokens/s", was["tokens/s"], now["tokens/s"], None]],
    )
    loss, steps = run_record.loss_difference(before, after)
    losses = f"largest difference {loss:.2g} nats over {tables.counted(steps, 'step')}"
    if differing := _other_inputs(before, after):
        losses = f"not compared, they differ in {'; '.join(differing)}"
    memory = f"Peak memory is that of the {before['memory']['kind']}."
    report.text(
        f"Loss curves: {losses}. {memory}",
        *run_facts.doubts({name: run for name, (_, run) in runs.items()}),
    )


def _other_inputs(before: TimedRun, after: TimedRun) -> list[str]:
    """The inputs of the loss curves that differ."""
    return run_record.differences(
        run_record.training_inputs(before), run_record.training_inputs(after)
    )


def kernel_reduction(baseline: Path, fused: Path, top: int) -> Report:
    """Compares the launches of two runs; the report has tables (the `top` first names), and a CSV
    with all names.
    """
    reduction = launch_changes.compare_launches(
        load_kernels.load(baseline), load_kernels.load(fused)
    )
    report = Report("Kernel reduction")
    report.text(*reduction.conditions)
    launch_changes.add_section(report, reduction, "kernel_reduction", top)
    return report


class Candidate(NamedTuple):
    """A run that finished a step: its record, or a profile, which holds one."""

    path: Path
    run: TimedRun
    profiled: bool  # whether it is a profile of whole steps


def versions(baseline: Path, other: Path) -> Report:
    """Compares the versions in two folders: their newest runs, and their newest profiles, that can
    be compared.

    Where no two can be compared, there are no numbers; the report names what differs between the
    newest two.
    """
    scripts = version_script(baseline, "--v1"), version_script(other, "--v2")
    if scripts[0].name == scripts[1].name:
        raise UsageError(
            f"--v1 {baseline} and --v2 {other} both hold {scripts[0].name}: give the folders of two versions"
        )
    ours, theirs = map(measured, scripts)
    report = Report(" and ".join(script.stem.removeprefix("tiny_llama_") for script in scripts))
    report.section("What was measured")
    if newest := _add_newest(report, add_runs, ours, theirs):
        report.text(
            _medians(
                *(
                    [one.run for one in each if not _differences(one, newest)]
                    for each in (ours, theirs)
                )
            )
        )
    report.section("Where a profiled step spends its time")
    _add_newest(
        report, add_spans, *([one for one in each if one.profiled] for each in (ours, theirs))
    )
    report.section("What changed in the code")
    report.commands([f"git diff --no-index {shlex.join(map(str, scripts))}"])
    return report


def version_script(folder: Path, flag: str) -> Path:
    """The one tiny_llama_vN.py in a folder."""
    scripts = sorted(folder.glob("tiny_llama_v*.py"))
    if len(scripts) != 1:
        found = " and ".join(script.name for script in scripts) or "no tiny_llama_vN.py"
        raise UsageError(
            f"{flag}: {folder} holds {found}: give a version's folder, such as ../version1_pytorch_baseline"
        )
    return scripts[0]


def measured(script: Path) -> list[Candidate]:
    """The version's runs: of *metrics*.json in its folder, and of profiles there or below."""
    paths = [*script.parent.glob("*metrics*.json"), *script.parent.rglob("profile_*.json")]
    return [
        one for one in map(read, paths) if one and f"tiny_llama_{one.run['version']}" == script.stem
    ]


def read(path: Path) -> Candidate | None:
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
    add: Callable[[Report, Runs], None],
    ours: Sequence[Candidate],
    theirs: Sequence[Candidate],
) -> Candidate | None:
    """Adds the newest two runs that can be compared and returns one, or adds why the newest two
    cannot; a pair is as old as the older of its runs.
    """
    pairs = list(itertools.product(ours, theirs))
    pairs.sort(key=lambda pair: min(one.run["date"] for one in pair), reverse=True)
    differing = [_differences(*pair) for pair in pairs]
    if [] in differing:
        newest = pairs[differing.index([])]
        add(report, {one.run["version"]: (one.path, one.run) for one in newest})
        return newest[0]
    why = (
        f"The newest, {pairs[0][0].path} and {pairs[0][1].path}, differ: {'; '.join(differing[0])}. "
        if pairs
        else ""
    )
    report.text(
        f"No two can be compared. {why}Run both with the same flags and `--enable-pytorch-profiler`."
    )
    return None


def _medians(*sides: Sequence[TimedRun]) -> str:
    """The medians of the processes of both sides, or that one process on a side does not tell; a
    profile's run counts once.
    """
    ours, theirs = (
        {run["date"]: run["step_ms"]["median"] for run in runs}.values() for runs in sides
    )
    if 1 in (len(ours), len(theirs)):
        return run_facts.ONE_PROCESS
    said = " and ".join(
        f"{median(times):.3g} ms ({min(times):.3g} to {max(times):.3g})" for times in (ours, theirs)
    )
    return f"Medians of {len(ours)} and {len(theirs)} processes: {said}; {median(ours) / median(theirs):.3g} times as fast."


def _differences(ours: Candidate, theirs: Candidate) -> list[str]:
    """Why the step times of the two cannot be compared."""
    unusable = [
        reason for one in (ours, theirs) for reason in run_record.unusable(one.path, one.run)
    ]
    return unusable + run_record.differences(
        *(run_record.conditions(one.run) for one in (ours, theirs))
    )


def add_spans(report: Report, runs: Runs) -> None:
    """Adds the time and the launches of each span of a profiled step."""
    before, after = (path for path, _ in runs.values())
    reduction = launch_changes.compare_launches(load_kernels.load(before), load_kernels.load(after))
    spans = reduction.by("span").sort_values("us_before", ascending=False)
    rows = [
        [
            span,
            us_before / 1e3,
            us_after / 1e3,
            us_before / us_after if us_after else None,
            calls_before,
            calls_after,
        ]
        for span, calls_before, calls_after, us_before, us_after in [
            *spans.drop(columns="change").itertuples(index=False),
            ("all", *reduction.launches[launch_changes.NUMBERS].sum()),
        ]
    ]
    report.text(reduction.conditions[0])
    report.facts(
        [(name, f"{path}, from {run_facts.origin(run)}") for name, (path, run) in runs.items()]
    )
    report.text(f"A step under the profiler: self time in ms, and {reduction.counted}.")
    counts = [f"{name} {reduction.counted}" for name in runs]
    report.table(["span", *(f"{name} ms" for name in runs), " / ".join(runs), *counts], rows)
    report.text(*reduction.notes)


def fusion_report(
    baseline: Sequence[Path], fused: Sequence[Path], ablation: Path | None, output: Path
) -> str:
    """Writes `output` (Markdown) and the page beside it, of the same name in .html; returns a line
    that names both.

    The two profiles, in files or folders, must be there. Without a fusion_ablation.json the report
    names its command.
    """
    if output.suffix != ".md":
        raise UsageError(
            f"--output {output}: name a .md file; the page is written beside it as .html"
        )
    reduction = launch_changes.compare_launches(
        load_kernels.load(_newest(baseline)), load_kernels.load(_newest(fused))
    )
    runs = {
        name: (path, step_profile.read(path)["run"])
        for name, path in zip(("baseline", "fused"), reduction.paths, strict=True)
    }
    report = Report("What fusion changes")
    report.section("Conditions")
    add_runs(report, runs)
    report.text("Ratios are baseline / fused: above 1 the fused version needs less.")
    report.section("Kernel counts and step time", "kernels")
    report.text(
        "A mean step under the profiler. Backward work counts for the span whose forward work it differentiates."
    )
    launch_changes.add_section(report, reduction, "kernels", TOP)
    if ablation:
        report.include(ablation_effects.analyze(ablation), "Ablation")
    else:
        report.section("Ablation")
        report.text("Not measured: run `python fusion_ablation_study.py --all-combinations`.")
    report.section("How to repeat", "repeat")
    report.text("In the folder of the version that a script belongs to:")
    report.commands(
        [
            f"python {command}"
            for command in (*(run["command"] for _, run in runs.values()), shlex.join(sys.argv))
        ]
    )
    return f"written: {', '.join(map(str, report.write(output.parent, output.stem, ('md', 'html'), '--output')))}"


def nothing_measured(commands: Sequence[str], output: Path) -> str:
    """Writes a fusion report that has no numbers yet: the commands that measure them; returns a
    line that names its files.
    """
    report = Report("What fusion changes")
    report.text("Not measured yet. These commands measure it; then run the last one again:")
    report.commands([*commands, f"python {shlex.join(sys.argv)}"])
    return f"written: {', '.join(map(str, report.write(output.parent, output.stem, ('md', 'html'), '--output')))}"


def _newest(places: Sequence[Path]) -> Path:
    """The newest profile among files and folders; the names of profiles begin with their time."""
    found = [
        path
        for place in places
        for path in ([place] if place.is_file() else place.rglob("profile_*.json"))
    ]
    if not found:
        raise UsageError(
            f"{places[0]} holds no profile_*.json: make one with --enable-pytorch-profiler --profile-dir {places[0]}"
        )
    return max(found, key=lambda path: path.name)
