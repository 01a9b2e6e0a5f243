"""Times each matrix product of the model alone, and compares it with the device's measured limits.

    python analyze_gemm_operations.py --model-config tiny_llama_v1_config.yaml \\
        --batch-sizes "4,8,16,32" --sequence-lengths "64,128,256"

Writes gemm_analysis.json after each shape of batch and sequence, and from it at the end
gemm_analysis.csv, .md and .png, into --output-dir.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli, config
from common import device as devices
from common.precision import AMP_DTYPES
from studies import gemm
from tracepage.files import writable_file
from tracepage.views.gemm_operations import render_gemms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--model-config", type=Path, metavar="FILE.yaml", help="its `model:` (default: preset tiny)"
    )
    add("--batch-sizes", type=cli.positive_list, default="4,8,16,32", metavar="B,B,...")
    add("--sequence-lengths", type=cli.positive_list, default="64,128,256", metavar="S,S,...")
    cli.add(parser, "--device")
    dtypes = ("float32", *AMP_DTYPES)
    add("--dtype", choices=dtypes, default="float32", help="of the operands (default: float32)")
    add("--allow-tf32", action="store_true", help="let fp32 products round to TF32 (NVIDIA)")
    cli.add_output_dir(parser, "gemm_analysis")
    options = cli.parse(parser)

    # The sizes of the model alone count.
    model = config.resolve(file=options.model_config, training={"sequence_length": 2}).model
    device = devices.select(options.device)
    path = options.output_dir / "gemm_analysis.json"
    writable_file(path, "--output-dir", (options.model_config,))
    gemm.measure(model, options, device, path)
    print(render_gemms(path).publish(path.parent, path.stem))


if __name__ == "__main__":
    cli.command(main)
