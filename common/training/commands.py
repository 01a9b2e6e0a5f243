"""`run_pytorch_profiler.py` of every version: a profiled run, or profiles that were taken before, and a report of either.

`run_deepspeed_flops.py` of every version: a run with three FLOP counts, its intensity and roofline, or an earlier result.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from common.analysis.reports import flop_counts, profile_summary, roofline
from common.errors import UsageError
from common.records import step_profile
from common.training import version_files


def profile(version: ModuleType, description: str | None) -> int:
    """Parses the command line, and profiles `version` or shows what was profiled; returns the exit code."""
    parser = version_files.run_parser(version, description)
    parser.add_argument(
        "--analyze-existing", type=Path, nargs="+", metavar="FILE", help="profile_*.json files to show; runs nothing"
    )
    parser.add_argument("--generate-report", action="store_true", help="write report.md beside the profile")
    arguments = parser.parse_args()
    paths, sort_by = arguments.analyze_existing, arguments.sort_by
    if paths:
        profiles = [step_profile.read(path) for path in paths]
        if sort_by and "memory" in sort_by and any(profile["memory_peak_bytes"] is None for profile in profiles):
            raise UsageError(f"--sort-by {sort_by}: a profile holds no memory: it was made without --profile-memory")
        print(profile_summary.report(paths, sort_by).terminal())
        code = 0
    else:
        options = version_files.run_options(version, arguments)
        run = version.train(replace(options, enable_pytorch_profiler=True, profile_operators=True))
        paths, code = run.profiles[:1], run.exit_code  # a run that was stopped may not have reached the steps that are profiled
    if arguments.generate_report and paths:
        for path in profile_summary.write(paths, sort_by):
            print(f"  report       {path}")
    return code


def count_flops(version: ModuleType, description: str | None) -> int:
    """Parses the command line, and counts the FLOPs of `version` or shows what was counted; returns the exit code."""
    parser = version_files.run_parser(version, description)
    parser.add_argument("--analyze-results", type=Path, metavar="FILE", help="a flops_profile.json to show; runs nothing")
    parser.add_argument(
        "--computational-intensity", action="store_true", help="profile, and print FLOPs per byte by span and by operator"
    )
    parser.add_argument(
        "--generate-roofline", action="store_true", help="profile, and write roofline.png and .csv beside the counts"
    )
    arguments = parser.parse_args()
    profiled = arguments.computational_intensity or arguments.generate_roofline
    if arguments.analyze_results:
        if profiled:
            raise UsageError("--computational-intensity and --generate-roofline need a run: leave --analyze-results out")
        print(flop_counts.report(flop_counts.read(arguments.analyze_results)).terminal())
        return 0
    options = version_files.run_options(version, arguments)
    run = version.train(replace(
        options, enable_deepspeed_flops=True, measure_peak=True,
        enable_pytorch_profiler=options.enable_pytorch_profiler or profiled,
    ))  # fmt: skip
    if run.flops:  # other processes leave them to the first
        print(flop_counts.report(flop_counts.read(run.flops[0])).terminal())
    report = roofline.report(step_profile.read(run.profiles[0])) if run.flops and run.profiles and profiled else None
    if report and arguments.computational_intensity:
        print(f"\n{report.terminal()}")
    if report and arguments.generate_roofline:
        written = report.write(options.flops_dir, "roofline", ("png", "csv"))
        print("", *(f"  roofline     {path}" for path in written), sep="\n")
    return run.exit_code
