"""Everything that was measured of a fused version and its baseline, as Markdown and as one page."""

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.records import run_record, step_profile
from tracepage.show import run_pair
from tracepage.show.report import Report
from tracepage.views import fusion_ablation, launch_changes

TITLE = "What fusion changes"
TOP = 10  # names in each table


def write_fusion_report(
    baseline: Sequence[Path], fused: Sequence[Path], ablation: Path | None, output: Path
) -> str:
    """Writes `output` (Markdown) and the page beside it, of the same name in .html.

    Of the profiles, in files or folders, the newest two that differ in the version alone are
    compared, and the others named. Without a fusion_ablation.json the report names its command.
    Returns a line that names both files.
    """
    if output.suffix != ".md":
        raise UsageError(
            f"--output {output}: name a .md file; the page is written beside it as .html"
        )
    sides = _conditions(baseline), _conditions(fused)
    before, after = _newest_pair(*sides)
    reduction = launch_changes.compare_launches(load_kernels.load(before), load_kernels.load(after))
    pair = {
        "baseline": (before, step_profile.read(before)["run"]),
        "fused": (after, step_profile.read(after)["run"]),
    }
    report = Report(TITLE)
    report.section("Conditions")
    run_pair.add_runs(report, pair)
    report.text("Ratios are baseline / fused: above 1 the fused version needs less.")
    others = [*_others(sides[0], before), *_others(sides[1], after)]
    if others:
        report.text(f"Profiles that are not in this report: {'; '.join(others)}.")
    report.section("Kernel counts and step time", "kernels")
    report.text(
        "A mean step under the profiler. Backward work counts for the span whose forward work it "
        "differentiates."
    )
    launch_changes.add_section(report, reduction, "kernels", TOP)
    if ablation:
        report.include(fusion_ablation.render_ablation(ablation), "Ablation")
    else:
        report.section("Ablation")
        report.text("Not measured: run `python fusion_ablation_study.py --all-combinations`.")
    report.section("How to repeat", "repeat")
    report.text("In the folder of the version that a script belongs to:")
    commands = [run["command"] for _, run in pair.values()]
    report.commands([f"python {command}" for command in (*commands, shlex.join(sys.argv))])
    return _write(report, output)


def write_commands(commands: Sequence[str], output: Path) -> str:
    """Writes a report that has no numbers yet: the commands that measure them."""
    report = Report(TITLE)
    report.text("Not measured yet. These commands measure it; then run the last one again:")
    report.commands([*commands, f"python {shlex.join(sys.argv)}"])
    return _write(report, output)


def _write(report: Report, output: Path) -> str:
    written = report.write(output.parent, output.stem, ("md", "html"), "--output")
    return f"written: {', '.join(map(str, written))}"


def _conditions(places: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """What each profile among files and folders was measured under, the newest first; the names of
    profiles begin with their time.
    """
    profiles: list[Path] = []
    for place in places:
        profiles += [place] if place.is_file() else place.rglob("profile_*.json")
    if not profiles:
        raise UsageError(
            f"{places[0]} holds no profile_*.json: "
            f"make one with --enable-pytorch-profiler --profile-dir {places[0]}"
        )
    profiles.sort(key=lambda path: path.name, reverse=True)
    return {
        path: launch_changes.conditions(files.read(path, step_profile.Profiled))
        for path in profiles
    }


def _newest_pair(
    baseline: dict[Path, dict[str, Any]], fused: dict[Path, dict[str, Any]]
) -> tuple[Path, Path]:
    """The newest two whose conditions are equal, or else the newest two; a pair is as old as the
    older of both.
    """
    pairs = list(itertools.product(baseline, fused))
    pairs.sort(key=lambda pair: min(path.name for path in pair), reverse=True)
    alike = [
        (before, after)
        for before, after in pairs
        if not run_record.differences(baseline[before], fused[after])
    ]
    return (alike or pairs)[0]


def _others(side: dict[Path, dict[str, Any]], chosen: Path) -> list[str]:
    """Each profile but the chosen one, and in which conditions it differs from that."""
    others = []
    for path in side:
        if path != chosen:
            differences = run_record.differences(side[path], side[chosen])
            others.append(f"{path}, {', '.join(differences) or 'which is older'}")
    return others
