"""Profiles Version 3 and shows each kernel of a step: launches, time, and gaps on the critical path.

python run_triton_profiling.py --batch-size 8 --seq-len 128 --num-steps 30     # every flag of tiny_llama_v3.py
python run_triton_profiling.py --analyze-existing pytorch_profiles/profile_*.json
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from studies import profiled_runs
from version3_triton import tiny_llama_v3

if __name__ == "__main__":
    cli.command(lambda: profiled_runs.profile_kernels(tiny_llama_v3, __doc__))
