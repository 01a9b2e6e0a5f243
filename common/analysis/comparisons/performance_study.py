"""A performance study of one version: its runs in each number format, and its profile and FLOP counts if they are there.

`launch_performance_study.sh` writes what is read here into one folder:

    metrics_fp32.json, metrics_bf16.json    records of runs that differ in nothing but the number format
    profiles/profile_*.json                 profiles of the version; the newest is shown
    profiles/rocprofv3, ncu, ...            what the vendor's profilers wrote; only named
    flops_analysis/flops_profile.json       the FLOP counts
"""

from pathlib import Path

from common.analysis.output import run_facts
from common.analysis.output.report import Report
from common.analysis.reports import flop_counts, profile_summary
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.run_record import TimedRun

FORMATS = ("fp32", "bf16")  # as in the names of the records
PROFILES = "profiles"
VENDOR = ("rocprofv3", "rocprof_sys", "rocprof_compute", "ncu", "nsys")
HEADER = (
    "precision", "ms/step", "p20", "p80", "tokens/s", "peak MiB", "TFLOP/s", "MFU %", "% of measured GEMM",
    "first loss", "last loss", "steps",
)  # fmt: skip


def analyze(folder: Path) -> Report:
    """The report on the study in a folder; with a profile it has a figure, spans.png."""
    runs = read(folder)
    if not runs:
        names = " or ".join(f"metrics_{name}.json" for name in FORMATS)
        raise UsageError(f"{folder} holds no {names} with a finished step: run launch_performance_study.sh first")
    first = next(iter(runs.values()))
    report = Report(f"Performance study of {first['version']}, preset {first['training']['preset']}")
    report.text(f"{run_facts.describe(first)}.")
    rows = []
    for run in runs.values():
        step, losses = run["step_ms"], run["loss"]["all"]
        own = {"p20": step["p20"], "p80": step["p80"], "first loss": losses[0], "last loss": losses[-1], "steps": len(losses)}
        cells = run_facts.columns(run) | own
        rows.append([cells[heading] for heading in HEADER])
    report.table(HEADER, rows)
    report.text(
        f"Step times are medians of the steps without the profiler. Peak memory is that of the {first['memory']['kind']}."
    )
    if any(run_facts.mfu(run) is not None for run in runs.values()):
        report.text("MFU is a share of the data sheet's peak.")
    report.text(*run_facts.doubts(runs))
    report.facts([(name, run_facts.origin(run)) for name, run in runs.items()])
    if any((folder / PROFILES).glob("profile_*.json")):
        path = step_profile.find(folder / PROFILES)
        profile = step_profile.read(path)
        profile_summary.add_section(report, path, profile)
        description = "Time of a mean step by span and phase, under the profiler"
        report.figure(lambda: profile_summary.span_figure(profile), "spans", description)
    counts = folder / flop_counts.FOLDER / flop_counts.FILE
    if counts.exists():
        report.section("FLOPs of a training step")
        report.table(*flop_counts.mfu_rows(flop_counts.read(counts)))
        report.text(flop_counts.HOW_TO_READ)
    if vendor := [(tool, f"`{PROFILES}/{tool}`") for tool in VENDOR if (folder / PROFILES / tool).is_dir()]:
        report.section("Profiles of the vendor's tools")
        report.facts(vendor)
    return report


def read(folder: Path) -> dict[str, TimedRun]:
    """The records in a study's folder that have a finished step, by number format."""
    paths = {name: folder / f"metrics_{name}.json" for name in FORMATS}
    found = {name: run_record.read(path) for name, path in paths.items() if path.exists()}
    return {name: run for name, run in found.items() if run_record.finished(run)}
