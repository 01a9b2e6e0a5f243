"""Profiles Version 4 and shows the critical path of a step: kernels, their times, and gaps.

python run_ultra_profiling.py --preset small --use-amp         # every flag of tiny_llama_v4.py
python run_ultra_profiling.py --analyze-existing pytorch_profiles
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import profiled_runs
from version4_ultra_fused import tiny_llama_v4

if __name__ == "__main__":
    cli.command(lambda: profiled_runs.profile_kernels(tiny_llama_v4, __doc__))
