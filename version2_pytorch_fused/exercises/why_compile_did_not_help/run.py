"""Trains Version 2 with the additions of starter/; its flags are Version 2's.

KERNEL_EXERCISES=solution takes those of solution/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import exercise_tools as exercises
from common import cli
from version2_pytorch_fused import tiny_llama_v2 as v2


def main() -> int:
    additions = exercises.load(Path(__file__).parent, "additions")
    for name in ("swiglu", "TinyLlama", "make_optimizer"):
        setattr(v2, name, getattr(additions, name))
    return v2.main()


if __name__ == "__main__":
    cli.command(main)
