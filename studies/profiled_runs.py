"""`run_pytorch_profiler.py` of every version: a profiled run, or profiles that were taken before,
and a report of either.

`run_triton_profiling.py` and `run_ultra_profiling.py`: the same with the critical path of a step,
by kernel. `run_deepspeed_flops.py` of every version: a run with three FLOP counts, its intensity
and roofline, or an earlier result.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from common import cli
from common.options import RunOptions
from studies import version_files
from tracepage.errors import UsageError
from tracepage.records import step_profile
from tracepage.views import critical_path, flop_counts, profile_summary


def profile(version: ModuleType, description: str | None) -> int:
    """Parses the command line, and profiles `version` or shows what was profiled; returns the exit
    code.
    """
    parser = version_files.run_parser(version, description, analyzed="profile_*.json files")
    parser.add_argument(
        "--generate-report", action="store_true", help="write report.md beside the profile"
    )
    arguments = cli.parse(parser)
    paths = arguments.analyze_existing
    sort_by = arguments.sort_by
    code = 0
    if paths:
        profiles = [step_profile.read(path) for path in paths]
        without_memory = any(profile["memory_peak_bytes"] is None for profile in profiles)
        if sort_by and "memory" in sort_by and without_memory:
            raise UsageError(
                f"--sort-by {sort_by}: a profile holds no memory: it was made without "
                "--profile-memory"
            )
        print(profile_summary.summary_report(paths, sort_by).terminal())
    else:
        options = version_files.run_options(version, arguments)
        paths, code = _profiled(version, replace(options, profile_operators=True))
    if arguments.generate_report and paths:
        for path in profile_summary.write_summaries(paths, sort_by):
            print(f"  report       {path}")
    return code


def _profiled(version: ModuleType, options: RunOptions) -> tuple[list[Path], int]:
    """The profile of a run, which may have been stopped before the steps that are profiled, and its
    exit code.
    """
    run = version.train(options)
    return run.profiles[:1], run.exit_code


def profile_kernels(version: ModuleType, description: str | None) -> int:
    """Parses the command line, profiles `version` or takes a profile, and shows the kernels of a
    step; returns the exit code.
    """
    parser = version_files.run_parser(
        version, description, analyzed="a profile, or a folder of some,"
    )
    arguments = cli.parse(parser)
    paths = [step_profile.find(path) for path in arguments.analyze_existing or ()]
    code = 0
    if not paths:
        paths, code = _profiled(version, version_files.run_options(version, arguments))
    for path in paths:
        print(
            critical_path.critical_path_report(
                path, step_profile.read(path), arguments.sort_by
            ).terminal()
        )
    return code


def count_flops(version: ModuleType, description: str | None) -> int:
    """Parses the command line, and counts the FLOPs of `version` or shows what was counted; returns
    the exit code.
    """
    parser = version_files.run_parser(version, description)
    add = parser.add_argument
    shown = "a flops_profile.json to show; runs nothing"
    add("--analyze-results", type=Path, metavar="FILE", help=shown)
    intensity = "print FLOPs per byte by span and by operator"
    add("--computational-intensity", action="store_true", help=intensity)
    drawn = "write roofline.png and .csv beside the counts"
    add("--generate-roofline", action="store_true", help=drawn)
    arguments = cli.parse(parser)
    path = arguments.analyze_results
    code = 0
    if not path:
        options = version_files.run_options(version, arguments)
        options = replace(options, enable_deepspeed_flops=True, measure_peak=True)
        # A shorter run would have slowed steps only.
        if not options.enable_pytorch_profiler and options.num_steps > 2:
            options = replace(options, enable_pytorch_profiler=True, profile_dir=options.flops_dir)
        run = version.train(options)
        if not run.flops:  # other processes leave them to the first
            return run.exit_code
        path = run.flops[0]
        code = run.exit_code
    counts = flop_counts.read_counts(path)
    print(flop_counts.render_flop_counts(counts).terminal())
    if code or not (arguments.computational_intensity or arguments.generate_roofline):
        return code
    report = flop_counts.render_intensity(counts)
    if arguments.computational_intensity:
        print(f"\n{report.terminal()}")
    if arguments.generate_roofline:
        print()
        for file in report.write(flop_counts.find(path).parent, "roofline", ("png", "csv")):
            print(f"  roofline     {file}")
    return code
