"""Profiles Version 1 with torch.profiler, or shows profiles that were taken before.

    python run_pytorch_profiler.py --batch-size 8 --num-steps 10   # every flag of tiny_llama_v1.py
    python run_pytorch_profiler.py --batch-size 8 --generate-report
    python run_pytorch_profiler.py --analyze-existing pytorch_profiles/profile_*.json

--generate-report also writes pytorch_profiles/report.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import profiled_runs
from version1_pytorch_baseline import tiny_llama_v1

if __name__ == "__main__":
    cli.command(lambda: profiled_runs.profile(tiny_llama_v1, __doc__))
