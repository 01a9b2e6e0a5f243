"""Profiles Version 1 with torch.profiler, or shows profiles that were taken before.

python run_pytorch_profiler.py --batch-size 8 --num-steps 10              # every flag of tiny_llama_v1.py
python run_pytorch_profiler.py --analyze-existing pytorch_profiles/profile_*.json
"""

from pathlib import Path

import tiny_llama_v1

from common import cli, run
from common.analysis import profile_report


def main() -> int:
    parser = run.parser(tiny_llama_v1, __doc__)
    parser.add_argument(
        "--analyze-existing", type=Path, nargs="+", metavar="FILE", help="profile_*.json files to show; runs nothing"
    )
    options = parser.parse_args()
    if options.analyze_existing:
        print("\n\n".join(profile_report.text(profile_report.read(path), options.sort_by) for path in options.analyze_existing))
        return 0
    options.enable_pytorch_profiler = options.profile_operators = True
    return run.train(tiny_llama_v1, cli.parse(options))


if __name__ == "__main__":
    cli.command(main)
