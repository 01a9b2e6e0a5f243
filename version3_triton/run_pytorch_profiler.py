"""Profiles Version 3 with torch.profiler, or shows profiles that were taken before.

python run_pytorch_profiler.py --batch-size 8 --num-steps 10              # every flag of tiny_llama_v3.py
python run_pytorch_profiler.py --batch-size 8 --generate-report           # the same as Markdown: pytorch_profiles/report.md
python run_pytorch_profiler.py --analyze-existing pytorch_profiles/profile_*.json
"""

from common import cli
from common.training import commands
from version3_triton import tiny_llama_v3

if __name__ == "__main__":
    cli.command(lambda: commands.profile(tiny_llama_v3, __doc__))
