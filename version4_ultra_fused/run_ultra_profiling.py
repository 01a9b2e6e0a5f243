"""Profiles Version 4 and shows the critical path of a step: kernels with GB/s, TFLOP/s and shares of the ceilings, and gaps.

python run_ultra_profiling.py --preset small --use-amp --num-steps 30          # every flag of tiny_llama_v4.py
python run_ultra_profiling.py --analyze-existing pytorch_profiles/profile_*.json --output-dir critical_path

Before and after: a profile of each version under the same flags, and one table of all.

for n in 1 2 3 4; do
    python ../version${n}_*/tiny_llama_v$n.py --use-amp --capture-step --num-steps 30 --profile-dir profiles/v$n
done
python run_ultra_profiling.py --analyze-existing profiles/*
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from argparse import Namespace

from common import cli
from common.analysis.formulas import own_kernels
from common.analysis.reports import critical_path
from common.files import writable_folder
from common.records import step_profile
from common.training import version_files
from version4_ultra_fused import tiny_llama_v4


def show(paths: list[Path], arguments: Namespace) -> None:
    """The critical path of one profile, or a table of several."""
    if len(paths) == 1:
        profile, stem = step_profile.read(paths[0]), critical_path.STEM
        report = critical_path.report(paths[0], profile, own_kernels.kernel_costs(profile), arguments.sort_by)
    else:
        report, stem = critical_path.compare(paths), "critical_paths"
    print(report.publish(arguments.output_dir, stem) if arguments.output_dir else report.terminal())


def main() -> int:
    parser = version_files.run_parser(tiny_llama_v4, __doc__, analyzed="profiles, or folders of some,")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write the report there too, and every launch as CSV")
    arguments = parser.parse_args()
    if arguments.output_dir:
        writable_folder(arguments.output_dir, "--output-dir")
    if arguments.analyze_existing:
        show([step_profile.find(path) for path in arguments.analyze_existing], arguments)
        return 0
    run = tiny_llama_v4.train(version_files.run_options(tiny_llama_v4, arguments))
    if run.profiles:  # a run that was stopped may not have reached the steps that are profiled
        show(run.profiles[:1], arguments)
    return run.exit_code


if __name__ == "__main__":
    cli.command(main)
