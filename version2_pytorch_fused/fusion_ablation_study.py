"""Measures what each fusion of Version 2 brings, alone and with others, interleaved in a process.

    python fusion_ablation_study.py                        # none, each alone, all but each, all
    python fusion_ablation_study.py --all-combinations     # all 16 of the model's four fusions
    python fusion_ablation_study.py --all-combinations --preset small --use-amp --amp-dtype bfloat16

Writes fusion_ablation.json (measured), and from it fusion_ablation.csv and .md, into --output-dir.
Ctrl-C ends the study after the round that is running.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import ablation, version_files
from tracepage.files import writable_file
from tracepage.views import fusion_ablation
from version2_pytorch_fused import tiny_llama_v2


def main() -> int:
    parser = version_files.parser(__doc__)
    add = parser.add_argument
    every = "all 16 of the model's fusions, and fused AdamW with none and all (default: 12)"
    add("--all-combinations", action="store_true", help=every)
    add("--rounds", type=cli.positive, default=5, help="over all combinations (default: 5)")
    cli.add_output_dir(parser, "fusion_ablation")
    arguments = cli.parse(parser)
    options = version_files.resolve(arguments)
    path = writable_file(
        arguments.output_dir / "fusion_ablation.json", "--output-dir", (arguments.config,)
    )
    code = ablation.measure(
        tiny_llama_v2, options, arguments.all_combinations, arguments.rounds, path
    )
    print(f"\n{fusion_ablation.render_ablation(path).publish(path.parent, path.stem)}")
    return code


if __name__ == "__main__":
    cli.command(main)
