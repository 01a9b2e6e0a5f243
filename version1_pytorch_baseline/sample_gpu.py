"""Samples utilization, power, memory and clocks of the GPUs while a command runs: a CSV file, and min, median and max.

    python sample_gpu.py -- python tiny_llama_v1.py --num-steps 300
    python sample_gpu.py --interval-ms 200 --output idle.csv              # until Ctrl-C

It asks nvidia-smi or amd-smi. Utilization only says that some kernel ran; MFU says how well.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli, sample_gpu
from common.analysis.output import tables


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--interval-ms", type=cli.positive, default=500, metavar="N",
                        help="time from one sample to the next, if the tool is as fast (default: 500)")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("gpu_samples.csv"), metavar="FILE.csv",
                        help="default: gpu_samples.csv")  # fmt: skip
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to run meanwhile (default: nothing)")
    options = parser.parse_args()
    code, tool, rows = sample_gpu.run(options.command, options.interval_ms, options.output)
    print(tables.text([f"GPU ({tool})", "quantity", "min", "median", "max", "samples"], sample_gpu.summary(rows)))
    print(f"{tables.counted(len(rows), 'sample')} in {options.output}")
    return code


if __name__ == "__main__":
    cli.command(main)
