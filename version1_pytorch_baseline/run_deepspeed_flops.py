"""Counts Version 1's FLOPs three ways and relates them to the measured step time, or shows an earlier result.

python run_deepspeed_flops.py --batch-size 8 --seq-len 128 --num-steps 10     # every flag of tiny_llama_v1.py
python run_deepspeed_flops.py --analyze-results flops_profile.json            # also looked for in flops_analysis/
"""

from pathlib import Path

import tiny_llama_v1

from common import cli, run
from common.analysis import flops_report


def main() -> int:
    parser = run.parser(tiny_llama_v1, __doc__)
    parser.add_argument("--analyze-results", type=Path, metavar="FILE", help="a flops_profile.json to show; runs nothing")
    options = parser.parse_args()
    results = options.analyze_results or flops_report.FOLDER / "flops_profile.json"
    if not options.analyze_results:
        options.enable_deepspeed_flops = options.measure_peak = True
        run.train(tiny_llama_v1, cli.parse(options))
    print(flops_report.text(flops_report.read(results)))
    return 0


if __name__ == "__main__":
    cli.command(main)
