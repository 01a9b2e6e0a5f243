"""Reports what fusion changes, from measured files: Markdown and a page that needs no network.

    python generate_fusion_report.py --output-dir ./optimization_analysis
    python generate_fusion_report.py --baseline ../version1_pytorch_baseline/complete_analysis \\
        --fused ./complete_rocm_analysis --output ./fusion_comparison_report.md

What is not named is taken from where the other commands write it. Where nothing is measured yet,
the report has the commands.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import fusion_report

BASELINE = [
    Path("../version1_pytorch_baseline", name) for name in ("pytorch_profiles", "complete_analysis")
]
FUSED = [Path("fusion_analysis"), Path("complete_analysis")]
PROFILE = "--num-steps 20 --enable-pytorch-profiler --profile-dir"
COMMANDS = {
    "baseline": f"python ../version1_pytorch_baseline/tiny_llama_v1.py {PROFILE} {BASELINE[0]}",
    "fused": f"python tiny_llama_v2.py {PROFILE} {FUSED[0]}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    v1 = f"profiles of Version 1; the newest is taken (default: {' '.join(map(str, BASELINE))})"
    parser.add_argument(
        "--baseline", type=Path, nargs="+", default=BASELINE, metavar="DIR", help=v1
    )
    fused = f"profiles of the fused version (default: {' '.join(map(str, FUSED))})"
    parser.add_argument("--fused", type=Path, nargs="+", default=FUSED, metavar="DIR", help=fused)
    ablation = next(Path().glob("fusion_ablation/fusion_ablation.json"), None)
    measured = "default: fusion_ablation/fusion_ablation.json if it is there"
    parser.add_argument("--ablation", type=Path, default=ablation, metavar="FILE", help=measured)
    written = parser.add_mutually_exclusive_group(required=True)
    written.add_argument(
        "--output", type=Path, metavar="FILE.md", help="the page goes beside it, as FILE.html"
    )
    written.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="write fusion_report.md and .html there"
    )
    options = cli.parse(parser)
    output = options.output or options.output_dir / "fusion_report.md"
    missing = [
        name
        for name, default in {"baseline": BASELINE, "fused": FUSED}.items()
        if not any(map(Path.exists, default))
    ]
    if missing and all(getattr(options, name) in (BASELINE, FUSED) for name in missing):
        print(fusion_report.write_commands([COMMANDS[name] for name in missing], output))
        return
    print(
        fusion_report.write_fusion_report(options.baseline, options.fused, options.ablation, output)
    )


if __name__ == "__main__":
    cli.command(main)
