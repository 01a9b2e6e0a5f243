"""Shows how peak memory grows with the sequence length, with flash attention and without.

    for s in 128 256 512 1024; do
        python tiny_llama_v2.py --seq-len $s --batch-size 4 --num-steps 3 \\
            --enable-memory-profiling --profile-dir ./flash_attention_seq$s
        python tiny_llama_v2.py --seq-len $s --batch-size 4 --num-steps 3 \\
            --enable-memory-profiling --profile-dir ./plain_attention_seq$s \\
            --disable-flash-attention
    done
    python analyze_sequence_memory.py --profile-dirs flash_attention_seq* plain_attention_seq*

The runs may differ in nothing but sequence length, version and attention. Writes
sequence_memory.json, .csv and .md into --output-dir.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import sequence_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--profile-dirs",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="a folder per run; its newest profile is read",
    )
    cli.add_output_dir(parser, "sequence_memory")
    options = cli.parse(parser)
    report = sequence_memory.render_sequence_memory(options.profile_dirs)
    print(report.publish(options.output_dir, "sequence_memory"))


if __name__ == "__main__":
    cli.command(main)
