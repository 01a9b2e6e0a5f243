"""FLOP counts of a training step beside its time: flops_profile.json, mfu_analysis.csv, and
reports.
"""

from pathlib import Path
from typing import cast

from tracepage import files
from tracepage.errors import UsageError
from tracepage.records.study_files import FlopCounts
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.views import bandwidth, roofline

FOLDER = Path("flops_analysis")
FILE = "flops_profile.json"
REFERENCE = "formula, causal"
EXECUTED = "formula, full S x S"
HOW_TO_READ = (
    "Utilization (MFU) is the first row: the work that the mathematics needs. The full count adds the masked half of the S "
    "x S pairs. FlopCounterMode counts the matrix products that ran, and all pairs of fused attention. DeepSpeed watches "
    "the forward pass only; its backward count is twice that by rule. Both watch the model without torch.compile, and count a "
    "kernel that they do not know as zero, unless its version reports what it computes."
)


def find(path: Path) -> Path:
    """flops_profile.json; a bare file name that is not here is looked for in ./flops_analysis."""
    found = path if path.exists() or path.name != str(path) else FOLDER / path
    if not found.exists():
        raise UsageError(
            f"no {path} here or in {FOLDER}/: run without --analyze-results first to write it"
        )
    return found


def read(path: Path) -> FlopCounts:
    """The counts in a file that `find` finds."""
    return files.read(find(path), FlopCounts)


def mfu_rows(profile: FlopCounts) -> tables.Table:
    """Per counter: GFLOP a step, TFLOP/s at the run's median step time, and % of two peaks (None
    where one is not known).
    """
    run = profile["run"]
    seconds = run["step_ms"]["median"] / 1e3
    measured = run["ceilings"] and run["ceilings"]["flops_per_second"]
    peaks = run_facts.peak_flops(run), measured
    header = ["counter", "forward GFLOP", "backward GFLOP", "step GFLOP", "of reference", "TFLOP/s"]
    header += ["% of peak", "% of measured GEMM"]
    reference = profile["counts"][0]["step"]
    return header, [
        [
            row["counter"],
            row["forward"] / 1e9,
            row["backward"] / 1e9,
            row["step"] / 1e9,
            row["step"] / reference,
            row["step"] / seconds / 1e12,
            *(100 * row["step"] / seconds / peak if peak else None for peak in peaks),
        ]
        for row in profile["counts"]
    ]


def report(profile: FlopCounts) -> Report:
    """FLOPs by counter and by part of the model, and why the counters differ; it writes
    mfu_analysis.csv.
    """
    run = profile["run"]
    parts = profile["parts"]
    peak = run_facts.peak_flops(profile["run"])
    needed = cast(dict[str, int], parts["causal"])
    executed = cast(dict[str, int], parts["full"])
    by_part = [
        [part, count / 1e9, executed[part] / 1e9, 100 * count / needed["total"]]
        for part, count in needed.items()
    ]
    known = (
        f"peak {tables.format_rate(peak)} (data sheet)"
        if peak
        else "the device's peak is not listed"
    )
    median = tables.format_time(run["step_ms"]["median"])
    result = Report("FLOPs of a training step")
    result.text(f"{run['version']}, {run_facts.describe(run)}; median step {median}, {known}.")
    result.table(*mfu_rows(profile), title="By counter", csv="mfu_analysis")
    result.table(
        ["part", "causal GFLOP", "full GFLOP", "% of causal"],
        by_part,
        title="Forward pass by part, matrix products",
    )
    result.text(HOW_TO_READ)
    if work := [row for row in profile.get("work", ()) if row["group"] == "span" and row["bytes"]]:
        counted = sum(row["flops"] or 0 for row in work)
        moved = sum(row["bytes"] or 0 for row in work)
        result.section("Memory bandwidth")
        result.facts(
            bandwidth.demand(counted, moved, run["step_ms"]["median"] / 1e3, run["ceilings"])
        )
    return result


def intensity(profile: FlopCounts) -> Report:
    """FLOPs per byte by span and by operator; it writes roofline.csv and roofline.png."""
    if "work" not in profile:
        raise UsageError(
            "the file holds no bytes: count again, with 3 steps or more, without --profile-attention-only"
        )
    run = profile["run"]
    points = [roofline.Point(**work) for work in profile["work"]]
    return roofline.roofline_report(
        points, run["ceilings"], f"{run['version']}, {run_facts.describe(run)}"
    )
