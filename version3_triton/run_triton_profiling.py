"""Profiles Version 3 and shows each Triton kernel: launches, time, bytes, and GB/s against what a copy reached in the same run.

python run_triton_profiling.py --batch-size 8 --seq-len 128 --num-steps 30     # every flag of tiny_llama_v3.py
python run_triton_profiling.py --analyze-existing pytorch_profiles/profile_*.json
"""

from argparse import Namespace
from pathlib import Path

from common import cli
from common.analysis.formulas import operators
from common.analysis.reports import triton_kernels
from common.config import ModelConfig
from common.records import step_profile
from common.training import run
from version3_triton import tiny_llama_v3
from version3_triton.kernels import costs


def show(path: Path, sort_by: str | None) -> None:
    profile = step_profile.read(path)
    run, training = profile["run"], profile["run"]["training"]
    shape = ModelConfig(**run["model"]), training["batch_size"], training["sequence_length"]
    print(triton_kernels.report(path, profile, costs.training_step(*shape, operators.element_bytes(run)), sort_by).terminal())


def profile_and_show(options: Namespace) -> int:
    options.enable_pytorch_profiler = True
    result = run.train(tiny_llama_v3, cli.parse(options))
    if result.profiles:  # a run that was stopped may not have reached the steps that are profiled
        show(result.profiles[0], options.sort_by)
    return result.exit_code


def main() -> int:
    parser = run.parser(tiny_llama_v3, __doc__)
    parser.add_argument("--analyze-existing", type=Path, nargs="+", metavar="FILE", help="profile_*.json to show; runs nothing")
    options = parser.parse_args()
    for path in options.analyze_existing or ():
        show(path, options.sort_by)
    return 0 if options.analyze_existing else profile_and_show(options)


if __name__ == "__main__":
    cli.command(main)
