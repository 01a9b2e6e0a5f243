"""`run_pytorch_profiler.py` of every version: a profiled run, or profiles that were taken before, and a report of either."""

from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common import cli, run
from common.analysis import bottlenecks, profile_report
from common.errors import UsageError


def main(version: ModuleType, description: str | None) -> None:
    """Parses the command line, profiles `version` or shows what was profiled, and exits the process."""
    parser = run.parser(version, description)
    parser.add_argument(
        "--analyze-existing", type=Path, nargs="+", metavar="FILE", help="profile_*.json files to show; runs nothing"
    )
    parser.add_argument("--generate-report", action="store_true", help="write report.md beside the profile")
    options = parser.parse_args()
    cli.command(lambda: _show(options) if options.analyze_existing else _profile(version, options))


def _show(options: Namespace) -> int:
    paths = options.analyze_existing
    profiles = [profile_report.read(path) for path in paths]
    if options.sort_by and "memory" in options.sort_by and any(profile["memory_peak_bytes"] is None for profile in profiles):
        raise UsageError(f"--sort-by {options.sort_by}: a profile holds no memory: it was made without --profile-memory")
    print("\n\n".join(profile_report.text(profile, options.sort_by) for profile in profiles))
    if options.generate_report:
        _report(paths, options.sort_by)
    return 0


def _profile(version: ModuleType, options: Namespace) -> int:
    options.enable_pytorch_profiler = options.profile_operators = True
    code = run.train(version, cli.parse(options))
    if options.generate_report and not code:  # a run that was stopped may not have reached the steps that are profiled
        _report([bottlenecks.find(options.profile_dir)], options.sort_by)
    return code


def _report(paths: list[Path], sort_by: str | None) -> None:
    for path in profile_report.write(paths, sort_by):
        print(f"  report       {path}")
