"""FLOP counts of a training step beside its time: flops_profile.json, mfu_analysis.csv, and
reports.
"""

from pathlib import Path

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
    "Utilization (MFU) is the first row: the work that the mathematics needs. The full count adds "
    "the masked half of the S x S pairs. FlopCounterMode counts the matrix products that ran, and "
    "all pairs of fused attention. DeepSpeed watches the forward pass only; its backward count is "
    "twice that by rule. Both watch the model without torch.compile, and count a kernel that they "
    "do not know as zero, unless its version reports what it computes."
)


def find(path: Path) -> Path:
    """flops_profile.json; a bare file name that is not here is looked for in ./flops_analysis."""
    places = [path, FOLDER / path] if path.name == str(path) else [path]
    for place in places:
        if place.exists():
            return place
    raise UsageError(
        f"no {path} here or in {FOLDER}/: run without --analyze-results first to write it"
    )


def read_counts(path: Path) -> FlopCounts:
    """The counts in a file that `find` finds."""
    return files.read(find(path), FlopCounts)


def mfu_rows(profile: FlopCounts) -> tables.Table:
    """Per counter: GFLOP a step, TFLOP/s at the run's median step time, and % of two peaks (None
    where one is not known).
    """
    run = profile["run"]
    seconds = run["step_ms"]["median"] / 1e3
    gemm = run["ceilings"] and run["ceilings"]["flops_per_second"]
    reference = profile["counts"][0]["step"]
    rows = []
    for count in profile["counts"]:
        rate = count["step"] / seconds
        gflop = [count[part] / 1e9 for part in ("forward", "backward", "step")]
        shares = [100 * rate / peak if peak else None for peak in (run_facts.peak_flops(run), gemm)]
        rows.append([count["counter"], *gflop, count["step"] / reference, rate / 1e12, *shares])
    header = ["counter", "forward GFLOP", "backward GFLOP", "step GFLOP", "of reference", "TFLOP/s"]
    return [*header, "% of peak", "% of measured GEMM"], rows


def render_flop_counts(profile: FlopCounts) -> Report:
    """FLOPs by counter and by part of the model, and why the counters differ; it writes
    mfu_analysis.csv.
    """
    run = profile["run"]
    needed = profile["parts"]["causal"]
    executed = profile["parts"]["full"]
    parts = [
        [part, count / 1e9, executed[part] / 1e9, 100 * count / needed["total"]]
        for part, count in needed.items()
    ]
    peak = run_facts.peak_flops(run)
    known = "the device's peak is not listed"
    if peak:
        known = f"peak {tables.format_rate(peak)} (data sheet)"
    median = run["step_ms"]["median"]
    report = Report("FLOPs of a training step")
    report.text(
        f"{run['version']}, {run_facts.describe(run)}; median step {tables.format_time(median)}, "
        f"{known}."
    )
    report.table(*mfu_rows(profile), title="By counter", csv="mfu_analysis")
    report.table(
        ["part", "causal GFLOP", "full GFLOP", "% of causal"],
        parts,
        title="Forward pass by part, matrix products",
    )
    report.text(HOW_TO_READ)
    spans = [row for row in profile.get("work", ()) if row["group"] == "span" and row["bytes"]]
    if spans:
        counted = sum(row["flops"] or 0 for row in spans)
        moved = sum(row["bytes"] or 0 for row in spans)
        report.section("Memory bandwidth")
        report.facts(bandwidth.demand(counted, moved, median / 1e3, run["ceilings"]))
    return report


def render_intensity(profile: FlopCounts) -> Report:
    """FLOPs per byte by span and by operator; it writes roofline.csv and roofline.png."""
    if "work" not in profile:
        raise UsageError(
            "the file holds no bytes: count again, with 3 steps or more, without "
            "--profile-attention-only"
        )
    run = profile["run"]
    points = [roofline.Point(**work) for work in profile["work"]]
    return roofline.roofline_report(
        points, run["ceilings"], f"{run['version']}, {run_facts.describe(run)}"
    )
