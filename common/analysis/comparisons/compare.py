"""Compares two runs. Each analysis below is one report, made of the sections that follow it.

    regression         two run records: is the second run as fast as it should be, and does it learn the same?
    kernel_reduction   two profiles: which launches are gone?
    versions           the folders of two versions: their newest runs and profiles that can be compared, and their code
    fusion_report      all that was measured of a fused version and its baseline, as Markdown and as one HTML page

Runs are compared where a difference can come from the code: same device, model, batch, sequence length, number format and
PyTorch. The speed-up is median(baseline) / median(current) of ms per step; its range is p20(baseline) / p80(current) to
p80(baseline) / p20(current). Losses are compared step by step where data, seed and learning rate are the same.
"""

import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common import files
from common.analysis.comparisons import ablation_effects, choose, growth, launch_changes, source_diff
from common.analysis.comparisons.choose import Choice
from common.analysis.output import run_facts, tables
from common.analysis.output.report import Report
from common.analysis.reports import bottlenecks, roofline
from common.analysis.reports.bottlenecks import Step
from common.analysis.reports.profile_summary import PHASE_COLOURS, span_figure
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.run_record import TimedRun

Runs = Mapping[str, tuple[Path, TimedRun]]  # two files and their records, under the names by which tables show them

TOP = 10  # names in each table of the fusion report
# The commands that make the fusion report's inputs, in the folder of Version 2.
SCRIPTS = ("../version1_pytorch_baseline/tiny_llama_v1.py", "tiny_llama_v2.py")
ABLATION = "python fusion_ablation_study.py --all-combinations"
SEQUENCES = [
    "for seq_len in 128 256 512 1024; do python tiny_llama_v2.py --seq-len $seq_len --batch-size 4 --enable-memory-profiling "
    f"{flags}--profile-dir ./{kind}_attention_seq${{seq_len}}; done"
    for kind, flags in (("flash", ""), ("plain", "--disable-flash-attention "))
]


class Verdict(NamedTuple):
    """The comparison, and why it is a regression (empty: it is none)."""

    report: Report
    failures: list[str]


def regression(baseline: Path, current: Path, min_speedup: float, loss_tolerance: float) -> Verdict:
    """Compares two run records. A smaller speed-up, or a larger difference of the loss curves in nats, is a regression."""
    before, after = run_record.read(baseline), run_record.read(current)
    reasons = [reason for path, run in ((baseline, before), (current, after)) for reason in run_record.unusable(path, run)]
    reasons += run_record.differences(run_record.conditions(before), run_record.conditions(after))
    if reasons or not (run_record.finished(before) and run_record.finished(after)):
        raise UsageError(f"{baseline} and {current} cannot be compared: {'; '.join(reasons)}; measure both again, alike")
    ours, theirs = before["step_ms"], after["step_ms"]
    speedup = ours["median"] / theirs["median"]
    slowest, fastest = ours["p20"] / theirs["p80"], ours["p80"] / theirs["p20"]
    loss, _ = run_record.loss_difference(before, after)
    failures = [] if speedup >= min_speedup else [f"the speed-up {speedup:.6g} is below {min_speedup:g}"]
    if not _other_inputs(before, after) and not loss <= loss_tolerance:
        failures.append(f"the loss curves differ by {loss:.2g}, more than {loss_tolerance:g}")
    report = Report("Regression test")
    add_runs(report, {"baseline": (baseline, before), "current": (current, after)})
    report.text(f"Speed-up {speedup:.3g}, from {slowest:.3g} to {fastest:.3g} by the 20th and 80th percentiles.")
    if slowest < 1 < fastest:
        report.text("The step times of the two overlap (the range holds 1): the difference is within their spread.")
    report.text(f"FAIL: {'; '.join(failures)}" if failures else f"PASS: the speed-up is at least {min_speedup:g}")
    return Verdict(report, failures)


def add_runs(report: Report, runs: Runs) -> None:
    """Adds what both ran on, their files, the numbers of the runs as a whole, their losses, and reasons to doubt their times."""
    before, after = (run for _, run in runs.values())
    loss, steps = run_record.loss_difference(before, after)
    differing = _other_inputs(before, after)
    losses = f"not compared, they differ in {'; '.join(differing)}" if differing else (
        f"largest difference {loss:.2g} nats over {tables.counted(steps, 'step')}"
    )  # fmt: skip

    def row(name: str, value: Callable[[TimedRun], float], with_ratio: bool = False) -> list[object]:
        ours, theirs = value(before), value(after)
        return [name, ours, theirs, ours / theirs if with_ratio else None]

    rows = [
        row("ms/step, median", lambda run: run["step_ms"]["median"], True),
        row("ms/step, p20", lambda run: run["step_ms"]["p20"], True),
        row("ms/step, p80", lambda run: run["step_ms"]["p80"], True),
        row("timed steps", lambda run: run["step_ms"]["count"]),
        row("tokens/s", lambda run: run["tokens_per_second"]),
        row(f"peak MiB ({before['memory']['kind']})", lambda run: run["memory"]["peak_mib"], True),
        row("parameters", lambda run: run["parameters"]),
        row(f"loss at step {steps}", lambda run: run["loss"]["all"][steps - 1]),
    ]
    report.text(run_facts.describe(before))
    add_files(report, runs)
    report.table(["quantity", *runs, " / ".join(runs)], rows)
    report.text(f"Loss curves: {losses}.", *run_facts.doubts({name: run for name, (_, run) in runs.items()}))


def add_files(report: Report, runs: Runs) -> None:
    """Adds the file, the command and the settings of each run."""
    report.facts([
        (name, f"{'' if name == run['version'] else run['version'] + ', '}{path}, from {run_facts.origin(run)}")
        for name, (path, run) in runs.items()
    ])  # fmt: skip


def _other_inputs(before: TimedRun, after: TimedRun) -> list[str]:
    """The inputs of the loss curves that differ."""
    return run_record.differences(run_record.training_inputs(before), run_record.training_inputs(after))


def kernel_reduction(baseline: Path, fused: Path, top: int) -> Report:
    """Compares the launches of two runs; the report has tables (the `top` first names), a figure, and a CSV with all names."""
    reduction = launch_changes.compare([baseline], [fused])
    report = Report("Kernel reduction")
    report.text(*reduction.conditions)
    launch_changes.add_section(report, reduction, "kernel_reduction", top)
    return report


def versions(baseline: Path, other: Path, output: Path | None) -> str:
    """Compares the versions in two folders, and returns the text for a terminal; with `output` the report is written there as
    Markdown.

    Where no two runs can be compared, there are no numbers; the report names what differs between the nearest two.
    """
    scripts = version_script(baseline, "--v1"), version_script(other, "--v2")
    if _name(scripts[0]) == _name(scripts[1]):
        raise UsageError(f"--v1 {baseline} and --v2 {other} both hold {scripts[0].name}: give the folders of two versions")
    if output:
        files.writable_file(output, "--output")
    ours, theirs = map(measured, scripts)
    runs = choose.choose(ours, theirs, choose.run_differences)
    shown = runs.pair[0].conditions if runs and not runs.differences else {}

    def profile_differences(pair: choose.Pair) -> list[str]:
        return choose.profile_differences(pair) or run_record.differences(shown, pair[0].conditions)

    ours, theirs = ([one for one in each if one.attention_only is not None] for each in (ours, theirs))
    profiles = choose.choose(ours, theirs, profile_differences)
    report = Report(" and ".join(map(_name, scripts)))
    report.section("What was measured")
    if found := _comparable(report, scripts, runs, "run records"):
        add_runs(report, found)
    report.section("Where a profiled step spends its time")
    if found := _comparable(report, scripts, profiles, "profiles" + " of the shape above" * bool(shown)):
        add_spans(report, found)
    report.section("What changed in the code")
    add_code(report, *scripts)
    if output:
        files.write_text(output, report.markdown())
    return report.terminal() + (f"\n\nwritten: {output}" if output else "")


def version_script(folder: Path, flag: str) -> Path:
    """The one tiny_llama_vN.py in a folder."""
    scripts = sorted(folder.glob("tiny_llama_v*.py"))
    if len(scripts) != 1:
        found = f"holds {' and '.join(script.name for script in scripts)}" if scripts else "holds no tiny_llama_vN.py"
        raise UsageError(f"{flag}: {folder} {found}: give a version's folder, such as ../version1_pytorch_baseline")
    return scripts[0]


def _name(script: Path) -> str:
    """The version in its run records, such as v1."""
    return script.stem.removeprefix("tiny_llama_")


def measured(script: Path) -> list[choose.Candidate]:
    """The version's newest run of each kind: of *metrics*.json in its folder, and of profiles there or below."""
    paths = itertools.chain(script.parent.glob("*metrics*.json"), script.parent.rglob("profile_*.json"))
    return choose.newest(one for one in map(choose.read, paths) if one and one.version == _name(script))


def _comparable(report: Report, scripts: Sequence[Path], choice: Choice | None, what: str) -> Runs | None:
    """The two runs; where they cannot be compared, adds why, and what to run."""
    if choice and not choice.differences:
        return {one.version: (one.path, one.run) for one in choice.pair}
    missing = ", or none of ".join(f"{_name(script)} in {script.parent}" for script in scripts)
    reason = f"There are no {what} of {missing}."
    if choice:
        paths = " and ".join(str(one.path) for one in choice.pair)
        reason = f"No two {what} can be compared. The nearest are {paths}, which differ: {'; '.join(choice.differences)}."
    report.text(f"{reason} Run")
    report.commands([
        f"(cd {shlex.quote(str(script.parent))} && python {script.name} --num-steps 100 --enable-pytorch-profiler)"
        for script in scripts
    ])  # fmt: skip
    return None


def add_spans(report: Report, runs: Runs, varied: Sequence[str] = ()) -> None:
    """Adds the time and the launches of each span of a profiled step; `varied` as in `launch_changes.compare`."""
    before, after = ([path] for path, _ in runs.values())
    reduction = launch_changes.compare(before, after, varied)
    spans = sorted(reduction.by("span"), key=lambda row: -row.us_before)
    rows = [
        [row.name, row.us_before / 1e3, row.us_after / 1e3, row.us_before / row.us_after if row.us_after else None,
         row.calls_before, row.calls_after]
        for row in [*spans, reduction.total]
    ]  # fmt: skip
    report.text(reduction.conditions[0])
    add_files(report, runs)
    report.text(f"A step under the profiler: self time in ms, and {reduction.counted}.")
    counts = [f"{name} {reduction.counted}" for name in runs]
    report.table(["span", *(f"{name} ms" for name in runs), " / ".join(runs), *counts], rows)
    report.text(*reduction.notes)


def add_code(report: Report, before: Path, after: Path) -> None:
    """Adds what became of each definition in the two scripts."""
    changes = source_diff.compare(before, after)
    same = [change.name for change in changes if change.kind == "same"]
    others = [change for change in changes if change.kind != "same"]
    report.text(f"{before} and {after}: of {len(changes)} definitions {len(same)} are the same and {len(others)} are not.")
    header = ["definition", "change", f"lines in {_name(before)}", f"lines in {_name(after)}", "added", "removed"]
    sums = [sum(column) for column in zip(*(change[2:] for change in others), strict=True)]
    report.table(header, [*others, ["all of these", "", *(sums or [0] * 4)]])
    report.text(f"The same in both: {', '.join(same) or 'none'}.")


def fusion_report(
    baseline: Sequence[Path], fused: Sequence[Path], ablation: Path | None, sequences: Sequence[Path] | None, output: Path
) -> str:
    """Writes `output` (Markdown) and the page beside it, of the same name in .html; returns a line that names both.

    The two profiles, in files or folders, must be there. A fusion_ablation.json, or folders of profiles at several sequence
    lengths, that are None are looked for where the other commands write them; a section without its measurement names the command
    that makes it.
    """
    if output.suffix != ".md":
        raise UsageError(f"--output {output}: name a .md file; the page is written beside it as .html")
    for folders, script in zip((baseline, fused), SCRIPTS, strict=True):
        if not any(folder.is_file() or any(folder.rglob("profile_*.json")) for folder in folders):
            command = f"python {script} --num-steps 30 --profile-dir {shlex.quote(str(folders[0]))}"
            raise UsageError(f"{folders[0]} holds no profile_*.json: make one with `{command}`")
    files.writable_file(output, "--output")
    reduction = launch_changes.compare(baseline, fused)
    steps = [bottlenecks.read_step(path) for path in reduction.paths]
    runs = {
        name: (path, step.profile["run"]) for name, path, step in zip(("baseline", "fused"), reduction.paths, steps, strict=True)
    }
    report, commands = Report("What fusion changes"), [run["command"] for _, run in runs.values()]
    report.section("Conditions")
    add_runs(report, runs)
    report.text("Ratios are baseline / fused: above 1 the fused version needs less.")
    add_step_time(report, runs, steps)
    report.section("Kernel counts", "kernels")
    launch_changes.add_section(report, reduction, "kernels", TOP)
    commands += add_memory(report, sequences)
    add_roofline(report, runs, steps)
    commands += add_ablation(report, ablation)
    report.section("How to repeat", "repeat")
    report.text("In the folder of the version that a script belongs to:")
    report.commands([f"python {command}" for command in [*commands, shlex.join(sys.argv)]])
    written = report.write(output.parent, output.stem, ("md", "html"), "--output")
    return f"written: {', '.join(map(str, written))}"


def add_step_time(report: Report, runs: Runs, steps: Sequence[Step]) -> None:
    """Adds the time of a profiled step, by span and phase; the largest span of the baseline comes first."""
    profiles = [step.profile for step in steps]
    times = [step_profile.span_milliseconds(profile) for profile in profiles]
    spans = dict.fromkeys(span for each in times for span in each)
    bars = {
        (span, phase): [each.get(span, {}).get(phase, 0.0) for each in times]
        for span in spans for phase in PHASE_COLOURS
        if any(phase in each.get(span, {}) for each in times)
    }  # fmt: skip
    on_gpu = steps[0].on_gpu
    rest = {
        ("GPU idle" if on_gpu else "outside operators", ""): [step.outside_us / 1e3 for step in steps],
        ("whole step", ""): [step.us / 1e3 for step in steps],
    }
    counts = " and ".join(str(profile["profiled_steps"]) for profile in profiles)
    report.section("Step time")
    report.text(
        f"Time {'on the GPU' if on_gpu else 'on the CPU'} of a step under the profiler (means of {counts} steps). Backward work "
        "counts for the span whose forward work it differentiates. In the figure the upper bar of a span is the baseline's, and "
        "time outside all spans is left out."
    )
    if profiles[0]["attention_only"]:
        report.text("Only attention was kept, so the whole step is that of attention.")
    report.figure(lambda: span_figure(*profiles), "step-time", "Time of each span before and after, by phase")
    rows = [[*labels, was, now, now - was] for labels, (was, now) in (bars | rest).items()]
    report.table(["span", "phase", *(f"{name} ms" for name in runs), "difference"], rows)


def add_memory(report: Report, folders: Sequence[Path] | None) -> list[str]:
    """Adds peak memory against sequence length, with and without the [S, S] matrix; returns the commands of the runs.

    Folders that were not named, but lie where the commands write them, may be of a study that was interrupted.
    """
    report.section("Memory against sequence length", "memory")
    found = folders if folders is not None else sorted(Path().glob("*_attention_seq*"))
    reason = ""
    try:
        runs = growth.read_lengths(found) if found else []
    except UsageError as error:
        if folders is not None:
            raise
        runs, reason = [], f" ({error})"
    if runs:
        growth.add_lengths(report, runs, "memory")
    else:
        report.text(f"Not measured{reason}; these commands do it, with flash attention and without:")
        report.commands(SEQUENCES)
    return [run.record["command"] for run in runs]


def add_roofline(report: Report, runs: Runs, steps: Sequence[Step]) -> None:
    """Adds how near each span is to the device's ceilings, before and after."""
    report.section("Roofline")
    measured = steps[0].profile["run"]["ceilings"]
    if not measured:
        report.text(f"Not measured; this does it: `python {SCRIPTS[0]} --profile-dir DIR --measure-peak`.")
        return
    points = [
        point._replace(group=name)
        for name, step in zip(runs, steps, strict=True)
        for point in roofline.from_profile(step.profile)
        if point.group == "span" and point.flops
    ]
    order = list(dict.fromkeys(point.name for point in points))
    points.sort(key=lambda point: order.index(point.name))
    figure = roofline.figure([point._replace(name=f"{point.name}, {point.group}") for point in points], measured)
    figure.axes[0].set_title("")  # the text gives the ceilings
    report.text(f"Baseline's {roofline.describe(measured)}. Above 100 % the data came from a cache, or the ceiling is too low.")
    report.figure(lambda: figure, "roofline", "FLOP/s of each span under the roofline, before and after")
    report.table(*roofline.table(points, measured))


def add_ablation(report: Report, path: Path | None) -> list[str]:
    """Adds the effect of each fusion on its own; returns the command of the study."""
    report.section("Ablation")
    path = path or next(Path().glob("fusion_ablation/fusion_ablation.json"), None)
    if not path:
        report.text("Not measured; this command does it:")
        report.commands([ABLATION])
        return []
    study = ablation_effects.read(path)
    ablation_effects.add_tables(report, study, "ablation", lambda title, anchor: report.text(f"{title}:"))
    return [study["command"]]
