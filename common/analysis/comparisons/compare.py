"""Compares two runs. Each analysis below is one report, made of the sections that follow it.

    regression         two run records: is the second run as fast as it should be, and does it learn the same?
    kernel_reduction   two profiles: which launches are gone?
    versions           the folders of two versions: their newest records and profiles
    fusion_report      all that was measured of a fused version and its baseline, as Markdown and as one HTML page

Runs are compared where a difference can come from the code: same device, model, batch, sequence length, number format and
PyTorch. The speed-up is median(baseline) / median(current) of ms per step. Losses are compared step by step where data, seed and
learning rate are the same.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import files
from common.analysis.comparisons import ablation_effects, launch_changes
from common.analysis.output import run_facts, tables
from common.analysis.output.report import Report
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.run_record import TimedRun

Runs = Mapping[str, tuple[Path, TimedRun]]  # two files and their records, under the names by which tables show them

TOP = 10  # names in each table of the fusion report


class Verdict(NamedTuple):
    """The comparison, and why it is a regression (empty: it is none)."""

    report: Report
    failures: list[str]


def regression(baseline: Path, current: Path, min_speedup: float, loss_tolerance: float) -> Verdict:
    """Compares two run records. A smaller speed-up, or a larger difference of the loss curves in nats, is a regression."""
    before, after = run_record.read(baseline), run_record.read(current)
    reasons = [reason for path, run in ((baseline, before), (current, after)) for reason in run_record.unusable(path, run)]
    reasons += run_record.differences(run_record.conditions(before), run_record.conditions(after))
    for path, run in ((baseline, before), (current, after)):
        losses, steps = len(run["loss"]["all"]), len(run["step_ms"]["all"])
        if losses != steps:
            reasons.append(f"{path.name} has losses of {losses} steps, and {steps} were timed")
    if reasons or not (run_record.finished(before) and run_record.finished(after)):
        raise UsageError(f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; measure both again, alike")
    speedup = before["step_ms"]["median"] / after["step_ms"]["median"]
    loss, _ = run_record.loss_difference(before, after)
    failures = [] if speedup >= min_speedup else [f"the speed-up {speedup:.6g} is below {min_speedup:g}"]
    if not _other_inputs(before, after) and not loss <= loss_tolerance:
        failures.append(f"the loss curves differ by {loss:.2g}, more than {loss_tolerance:g}")
    report = Report("Regression test")
    add_runs(report, {"baseline": (baseline, before), "current": (current, after)})
    report.text(f"Speed-up {speedup:.3g}. {run_facts.ONE_PROCESS}")
    report.text(f"FAIL: {'; '.join(failures)}" if failures else f"PASS: the speed-up is at least {min_speedup:g}")
    return Verdict(report, failures)


def add_runs(report: Report, runs: Runs) -> None:
    """Adds what both ran on, their files, the numbers of the runs as a whole, their losses, and reasons to doubt their times."""
    (_, before), (_, after) = runs.values()
    report.text(run_facts.describe(before))
    report.facts([(name, f"{path}, from {run_facts.origin(run)}") for name, (path, run) in runs.items()])
    was, now = (dict[str, Any](run_facts.columns(run) | run["step_ms"]) for run in (before, after))
    rows = [[name, was[name], now[name], was[name] / now[name]] for name in ("ms/step", "p20", "p80", "peak MiB")]
    report.table(["quantity", *runs, " / ".join(runs)], [*rows, ["tokens/s", was["tokens/s"], now["tokens/s"], None]])
    loss, steps = run_record.loss_difference(before, after)
    losses = f"largest difference {loss:.2g} nats over {tables.counted(steps, 'step')}"
    if differing := _other_inputs(before, after):
        losses = f"not compared, they differ in {'; '.join(differing)}"
    memory = f"Peak memory is that of the {before['memory']['kind']}."
    report.text(f"Loss curves: {losses}. {memory}", *run_facts.doubts({name: run for name, (_, run) in runs.items()}))


def _other_inputs(before: TimedRun, after: TimedRun) -> list[str]:
    """The inputs of the loss curves that differ."""
    return run_record.differences(run_record.training_inputs(before), run_record.training_inputs(after))


def kernel_reduction(baseline: Path, fused: Path, top: int) -> Report:
    """Compares the launches of two runs; the report has tables (the `top` first names), and a CSV with all names."""
    reduction = launch_changes.compare(baseline, fused)
    report = Report("Kernel reduction")
    report.text(*reduction.conditions)
    launch_changes.add_section(report, reduction, "kernel_reduction", top)
    return report


def versions(baseline: Path, other: Path) -> Report:
    """Compares the newest run records and the newest profiles in two folders of versions."""
    scripts = version_script(baseline, "--v1"), version_script(other, "--v2")
    ours, theirs = map(measured, scripts)
    newest = {run["version"]: (path, run) for path, run in (ours[-1], theirs[-1])}
    paths, conditions = (ours[-1][0], theirs[-1][0]), [run_record.conditions(run) for _, run in newest.values()]
    run_record.require_equal(paths, (conditions[0], conditions[-1]), "the version")
    report = Report(" and ".join(newest))
    report.section("What was measured")
    add_runs(report, newest)
    report.text(_medians(*([run for _, run in side if run_record.conditions(run) == conditions[0]] for side in (ours, theirs))))
    report.section("Where a profiled step spends its time")
    reduction = launch_changes.compare(_newest([baseline]), _newest([other]))
    report.text(*reduction.conditions)
    launch_changes.add_section(report, reduction, "launches", TOP)
    report.section("What changed in the code")
    report.commands([f"git diff --no-index {shlex.join(map(str, scripts))}"])
    return report


def version_script(folder: Path, flag: str) -> Path:
    """The one tiny_llama_vN.py in a folder."""
    scripts = sorted(folder.glob("tiny_llama_v*.py"))
    if len(scripts) != 1:
        found = " and ".join(script.name for script in scripts) or "no tiny_llama_vN.py"
        raise UsageError(f"{flag}: {folder} holds {found}: give a version's folder, such as ../version1_pytorch_baseline")
    return scripts[0]


def measured(script: Path) -> list[tuple[Path, TimedRun]]:
    """The records of the version's completed runs, of *metrics*.json beside its script, the newest last."""
    found = []
    for path in script.parent.glob("*metrics*.json"):
        run = run_record.read(path) if files.read_json(path).get("schema") == run_record.SCHEMA else None
        if run and run_record.finished(run) and not run_record.unusable(path, run) and script.stem.endswith(run["version"]):
            found.append((path, run))
    if not found:
        raise UsageError(f"{script.parent} holds no *metrics*.json of a completed run of {script.name}: run it there")
    return sorted(found, key=lambda each: each[1]["date"])


def _medians(*sides: Sequence[TimedRun]) -> str:
    """The medians of the processes of both sides, or that one process on a side does not tell."""
    ours, theirs = ([run["step_ms"]["median"] for run in runs] for runs in sides)
    if 1 in (len(ours), len(theirs)):
        return run_facts.ONE_PROCESS
    said = " and ".join(f"{median(times):.3g} ms ({min(times):.3g} to {max(times):.3g})" for times in (ours, theirs))
    return f"Medians of {len(ours)} and {len(theirs)} processes: {said}; {median(ours) / median(theirs):.3g} times as fast."


def fusion_report(baseline: Sequence[Path], fused: Sequence[Path], ablation: Path | None, output: Path) -> str:
    """Writes `output` (Markdown) and the page beside it, of the same name in .html; returns a line that names both.

    The two profiles, in files or folders, must be there. Without a fusion_ablation.json the report names its command.
    """
    if output.suffix != ".md":
        raise UsageError(f"--output {output}: name a .md file; the page is written beside it as .html")
    reduction = launch_changes.compare(_newest(baseline), _newest(fused))
    runs = {
        name: (path, step_profile.read(path)["run"]) for name, path in zip(("baseline", "fused"), reduction.paths, strict=True)
    }
    report = Report("What fusion changes")
    report.section("Conditions")
    add_runs(report, runs)
    report.text("Ratios are baseline / fused: above 1 the fused version needs less.")
    report.section("Kernel counts and step time", "kernels")
    report.text("A mean step under the profiler. Backward work counts for the span whose forward work it differentiates.")
    launch_changes.add_section(report, reduction, "kernels", TOP)
    if ablation:
        report.include(ablation_effects.analyze(ablation), "Ablation")
    else:
        report.section("Ablation")
        report.text("Not measured: run `python fusion_ablation_study.py --all-combinations`.")
    report.section("How to repeat", "repeat")
    report.text("In the folder of the version that a script belongs to:")
    report.commands([f"python {command}" for command in (*(run["command"] for _, run in runs.values()), shlex.join(sys.argv))])
    return f"written: {', '.join(map(str, report.write(output.parent, output.stem, ('md', 'html'), '--output')))}"


def _newest(places: Sequence[Path]) -> Path:
    """The newest profile among files and folders; the names of profiles begin with their time."""
    found = [path for place in places for path in ([place] if place.is_file() else place.rglob("profile_*.json"))]
    if not found:
        raise UsageError(
            f"{places[0]} holds no profile_*.json: make one with --enable-pytorch-profiler --profile-dir {places[0]}"
        )
    return max(found, key=lambda path: path.name)
