"""`run_pytorch_profiler.py` of every version: a profiled run, or profiles that were taken before, and a report of either.

`run_deepspeed_flops.py` of every version: a run with three FLOP counts, its intensity and roofline, or an earlier result.
"""

from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common import cli
from common.analysis.reports import flop_counts, profile_summary, roofline
from common.errors import UsageError
from common.records import step_profile
from common.training import run


def profile(version: ModuleType, description: str | None) -> None:
    """Parses the command line, profiles `version` or shows what was profiled, and exits the process."""
    parser = run.parser(version, description)
    parser.add_argument(
        "--analyze-existing", type=Path, nargs="+", metavar="FILE", help="profile_*.json files to show; runs nothing"
    )
    parser.add_argument("--generate-report", action="store_true", help="write report.md beside the profile")
    options = parser.parse_args()
    cli.command(lambda: _show_profiles(options) if options.analyze_existing else _run_profiled(version, options))


def _show_profiles(options: Namespace) -> int:
    paths = options.analyze_existing
    profiles = [step_profile.read(path) for path in paths]
    if options.sort_by and "memory" in options.sort_by and any(profile["memory_peak_bytes"] is None for profile in profiles):
        raise UsageError(f"--sort-by {options.sort_by}: a profile holds no memory: it was made without --profile-memory")
    print(profile_summary.report(paths, options.sort_by).terminal())
    if options.generate_report:
        _write_reports(paths, options.sort_by)
    return 0


def _run_profiled(version: ModuleType, options: Namespace) -> int:
    options.enable_pytorch_profiler = options.profile_operators = True
    result = run.train(version, cli.parse(options))
    if options.generate_report and result.profiles:  # a run that was stopped may not have reached the steps that are profiled
        _write_reports(result.profiles[:1], options.sort_by)
    return result.exit_code


def _write_reports(paths: list[Path], sort_by: str | None) -> None:
    for path in profile_summary.write(paths, sort_by):
        print(f"  report       {path}")


def count_flops(version: ModuleType, description: str | None) -> None:
    """Parses the command line, counts the FLOPs of `version` or shows what was counted, and exits the process."""
    parser = run.parser(version, description)
    parser.add_argument("--analyze-results", type=Path, metavar="FILE", help="a flops_profile.json to show; runs nothing")
    parser.add_argument(
        "--computational-intensity", action="store_true", help="profile, and print FLOPs per byte by span and by operator"
    )
    parser.add_argument(
        "--generate-roofline", action="store_true", help="profile, and write roofline.png and .csv beside the counts"
    )
    options = parser.parse_args()
    cli.command(lambda: _show_flops(options) if options.analyze_results else _run_counted(version, options))


def _show_flops(options: Namespace) -> None:
    if options.computational_intensity or options.generate_roofline:
        raise UsageError("--computational-intensity and --generate-roofline need a run: leave --analyze-results out")
    print(flop_counts.report(flop_counts.read(options.analyze_results)).terminal())


def _run_counted(version: ModuleType, options: Namespace) -> int:
    profiled = options.computational_intensity or options.generate_roofline
    options.enable_deepspeed_flops = options.measure_peak = True
    options.enable_pytorch_profiler |= profiled
    options = cli.parse(options)
    result = run.train(version, options)
    if not result.flops:  # a process that leaves them to the first
        return result.exit_code
    print(flop_counts.report(flop_counts.read(result.flops[0])).terminal())
    if profiled and result.profiles:  # a run that was stopped may not have reached the steps that are profiled
        _show_intensity(options, result.profiles[0])
    return result.exit_code


def _show_intensity(options: Namespace, path: Path) -> None:
    """Prints and writes what was asked for, from the profile that the run has just written."""
    report = roofline.report(step_profile.read(path))
    if options.computational_intensity:
        print(f"\n{report.terminal()}")
    if options.generate_roofline:
        written = report.write(options.flops_dir, "roofline", ("png", "csv"))
        print("", *(f"  roofline     {path}" for path in written), sep="\n")
