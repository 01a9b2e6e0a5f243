"""Reports what fusion changes, from measured files: Markdown, and a page of the same name that needs no network.

    python generate_fusion_report.py --output-dir ./optimization_analysis
    python generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis \\
        --fused ./complete_rocm_analysis --output ./fusion_comparison_report.md

What is not named is taken from where the other commands write it. Only the two profiles must be there.
"""

from pathlib import Path

from common import cli
from common.analysis.comparisons import compare

BASELINE = [Path("../version1_pytorch_baseline", name) for name in ("pytorch_profiles", "complete_analysis")]
FUSED = [Path("fusion_analysis"), Path("complete_analysis")]


def main() -> None:
    parser = cli.Parser(__doc__)
    newest = "the newest profiles that can be compared are taken"
    parser.add_argument("--baseline", type=Path, nargs="+", default=BASELINE, metavar="DIR",
                        help=f"profiles of Version 1; {newest} (default: {' '.join(map(str, BASELINE))})")  # fmt: skip
    parser.add_argument("--fused", type=Path, nargs="+", default=FUSED, metavar="DIR",
                        help=f"profiles of the fused version (default: {' '.join(map(str, FUSED))})")  # fmt: skip
    parser.add_argument(
        "--ablation", type=Path, metavar="FILE", help="default: fusion_ablation/fusion_ablation.json if it is there"
    )
    parser.add_argument(
        "--sequence-dirs", type=Path, nargs="+", metavar="DIR",
        help="profiles at several sequence lengths (default: flash_attention_seq*, plain_attention_seq*)",
    )  # fmt: skip
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", type=Path, metavar="FILE.md", help="the page goes beside it, as FILE.html")
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="write fusion_report.md and .html there")
    options = parser.parse_args()
    inputs = compare.Inputs(options.baseline, options.fused, options.ablation, options.sequence_dirs)
    print(compare.fusion_report(inputs, options.output or options.output_dir / "fusion_report.md"))


if __name__ == "__main__":
    cli.command(main)
