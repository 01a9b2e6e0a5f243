"""Reports what fusion changes, from measured files: Markdown, and a page of the same name that needs no network.

    python generate_fusion_report.py --output-dir ./optimization_analysis
    python generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis \\
        --fused ./complete_rocm_analysis --output ./fusion_comparison_report.md

What is not named is taken from where the other commands write it. Only the two profiles must be there.
"""

from pathlib import Path

from common import cli
from common.documents import fusion_report

BASELINE = Path("../version1_pytorch_baseline/pytorch_profiles")


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--baseline", type=Path, default=BASELINE, metavar="DIR", help=f"profiles of Version 1 (default: {BASELINE})"
    )
    parser.add_argument("--fused", type=Path, default=Path("fusion_analysis"), metavar="DIR", help="default: fusion_analysis")
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
    inputs = fusion_report.Inputs(
        options.baseline,
        options.fused,
        options.ablation or next(Path().glob("fusion_ablation/fusion_ablation.json"), None),
        options.sequence_dirs or sorted(Path().glob("*_attention_seq*")),
    )
    print(fusion_report.write(inputs, options.output or options.output_dir / "fusion_report.md"))


if __name__ == "__main__":
    cli.command(main)
