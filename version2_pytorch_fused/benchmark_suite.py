"""Benchmarks versions and external baselines at equal shapes, each in a process of its own.

    python benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 --seq-lengths 128,256,512 \\
        --metrics throughput,memory,accuracy
    python benchmark_suite.py --models v1,v2,v2-compile,hf,hf-compile,liger --preset small --use-amp --num-steps 50

Models: every version that is there (v1, v2, ...), a version with torch.compile (v2-compile), and transformers' LLaMA: hf (eager),
hf-compile, and liger (with Liger's kernels; GPU only). The step of each can be captured as one graph (v1-captured; GPU only).

Writes benchmark.json (measured), and from it benchmark.csv, .md and .png, into --output-dir.
The exit code is 1 if a model failed for another reason than memory; the other models are measured all the same.
"""

from pathlib import Path

from common import cli
from common.files import writable_folder
from common.studies import benchmark
from common.training import version_files


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def main() -> int:
    parser = version_files.parser(__doc__, batch_size=False, sequence_length=False, capture=False)
    parser.add_argument("--models", type=names, default=["v1", "v2"], metavar="NAMES", help="default: v1,v2")
    parser.add_argument(
        "--batch-sizes", type=cli.positive_list, default=[4, 8, 16, 32], metavar="LIST", help="default: 4,8,16,32"
    )
    parser.add_argument(
        "--seq-lengths", type=cli.positive_list, default=[128, 256, 512], metavar="LIST", help="default: 128,256,512"
    )
    parser.add_argument("--metrics", type=names, default=list(benchmark.METRICS), metavar="NAMES", help="default: all three")
    parser.add_argument("--num-steps", type=cli.positive, default=5, metavar="N", help="timed, in each process (default: 5)")
    parser.add_argument("--repeats", type=cli.positive, default=3, metavar="N", help="processes a cell, in turn (default: 3)")
    parser.add_argument(
        "--accuracy-steps", type=cli.positive, default=20, metavar="N", help="before the loss that is compared (default: 20)"
    )
    parser.add_argument("--timeout", type=cli.positive, default=600, metavar="SECONDS", help="of each process (default: 600)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("benchmark_suite"), metavar="DIR", help="default: benchmark_suite"
    )
    options = parser.parse_args()
    known = benchmark.known_models()
    models, shapes = benchmark.plan(options, known)
    path = writable_folder(options.output_dir, "--output-dir") / "benchmark.json"
    code = benchmark.measure(models, shapes, next(iter(known.values())), path)
    print(f"\n{benchmark.analyze(path).publish(options.output_dir, 'benchmark')}")
    return code


if __name__ == "__main__":
    cli.command(main)
