"""Profiles Version 3 and shows each kernel of a step: launches, time, and gaps on the critical
path.

    python run_triton_profiling.py --batch-size 8 --num-steps 30   # every flag of tiny_llama_v3.py
    python run_triton_profiling.py --analyze-existing pytorch_profiles/profile_*.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import profiled_runs
from version3_triton import tiny_llama_v3

if __name__ == "__main__":
    cli.command(lambda: profiled_runs.profile_kernels(tiny_llama_v3, __doc__))
