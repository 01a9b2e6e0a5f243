"""`run_deepspeed_flops.py` of every version: a run with three FLOP counts, its intensity and roofline, or an earlier result."""

from argparse import Namespace
from pathlib import Path
from types import ModuleType

from common import cli, run
from common.analysis import bottlenecks, flops_report, plots, profile_report, roofline, tables
from common.errors import UsageError
from common.files import write_text


def main(version: ModuleType, description: str | None) -> None:
    """Parses the command line, counts the FLOPs of `version` or shows what was counted, and exits the process."""
    parser = run.parser(version, description)
    parser.add_argument("--analyze-results", type=Path, metavar="FILE", help="a flops_profile.json to show; runs nothing")
    parser.add_argument(
        "--computational-intensity", action="store_true", help="profile, and print FLOPs per byte by span and by operator"
    )
    parser.add_argument(
        "--generate-roofline", action="store_true", help=f"profile, and write roofline.png and .csv into {flops_report.FOLDER}"
    )
    options = parser.parse_args()
    cli.command(lambda: _show(options) if options.analyze_results else _count(version, options))


def _show(options: Namespace) -> None:
    if options.computational_intensity or options.generate_roofline:
        raise UsageError("--computational-intensity and --generate-roofline need a run: leave --analyze-results out")
    print(flops_report.text(flops_report.read(options.analyze_results)))


def _count(version: ModuleType, options: Namespace) -> int:
    profiled = options.computational_intensity or options.generate_roofline
    options.enable_deepspeed_flops = options.measure_peak = True
    options.enable_pytorch_profiler |= profiled
    options = cli.parse(options)
    code = run.train(version, options)
    print(flops_report.text(flops_report.read(flops_report.FOLDER / "flops_profile.json")))
    if profiled and not code:  # a run that was stopped may not have reached the steps that are profiled
        _report_intensity(options)
    return code


def _report_intensity(options: Namespace) -> None:
    """Prints and writes what was asked for, from the profile that the run has just written."""
    profile = profile_report.read(bottlenecks.find(options.profile_dir))
    points, ceilings = roofline.from_profile(profile), profile["run"]["ceilings"]
    table = roofline.table(points, ceilings)
    if options.computational_intensity:
        heading = f"computational intensity of a mean step; {roofline.describe(ceilings)}"
        print(f"\n{heading}\n{tables.text(*table)}\n\n{roofline.READ}")
    if options.generate_roofline:
        paths = [flops_report.FOLDER / f"roofline.{kind}" for kind in ("png", "csv")]
        plots.save(roofline.figure(points, ceilings, profile_report.conditions(profile)), paths[0])
        write_text(paths[1], tables.csv_text(*table))
        print("", *(f"  roofline     {path}" for path in paths), sep="\n")
