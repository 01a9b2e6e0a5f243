"""Profiles Version 3 and shows each kernel of a step: launches, time, and GB/s against what a copy reached in the same run.

python run_triton_profiling.py --batch-size 8 --seq-len 128 --num-steps 30     # every flag of tiny_llama_v3.py
python run_triton_profiling.py --analyze-existing pytorch_profiles/profile_*.json
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from common.analysis.formulas import own_kernels
from common.analysis.reports import critical_path
from common.records import step_profile
from common.training import version_files
from version3_triton import tiny_llama_v3


def show(path: Path, sort_by: str | None) -> None:
    profile = step_profile.read(path)
    print(critical_path.report(path, profile, own_kernels.kernel_costs(profile), sort_by).terminal())


def main() -> int:
    parser = version_files.run_parser(tiny_llama_v3, __doc__, analyzed="profile_*.json")
    arguments = parser.parse_args()
    paths, code = arguments.analyze_existing, 0
    if not paths:
        run = tiny_llama_v3.train(version_files.run_options(tiny_llama_v3, arguments))
        paths, code = run.profiles[:1], run.exit_code  # a run that was stopped may not have reached the steps that are profiled
    for path in paths:
        show(path, arguments.sort_by)
    return code


if __name__ == "__main__":
    cli.command(main)
