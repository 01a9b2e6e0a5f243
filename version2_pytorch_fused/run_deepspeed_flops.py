"""Counts Version 2's FLOPs three ways and relates them to the step time, or shows earlier counts.

    python run_deepspeed_flops.py --batch-size 8 --num-steps 10    # every flag of tiny_llama_v2.py
    python run_deepspeed_flops.py --seq-len 256 --computational-intensity --generate-roofline
    python run_deepspeed_flops.py --analyze-results flops_profile.json

A result that is not found as it is named is looked for in flops_analysis/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import profiled_runs
from version2_pytorch_fused import tiny_llama_v2

if __name__ == "__main__":
    cli.command(lambda: profiled_runs.count_flops(tiny_llama_v2, __doc__))
