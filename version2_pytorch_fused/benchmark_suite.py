"""Benchmarks versions and external baselines at equal shapes, each in a process of its own.

    python benchmark_suite.py --models v1,v2 --batch-sizes 4,8,16,32 --seq-lengths 128,256,512 \\
        --metrics throughput,memory,accuracy
    python benchmark_suite.py --models v1,v2,v2-compile,hf,liger --preset small --use-amp

Models:

    v1, v2, ...               every version that is there
    v2-compile, v4-fp8        a version with torch.compile, or with products in FP8
    v1-captured               the step of any model but `captured`, as one graph
    v4-no-early-update        a version with a switch off
    v4-fa4                    a version with a switch on that is off by default
    v1-captured-deterministic any of these versions, deterministic beside others
    hf, hf-compile            transformers' LLaMA, eager or compiled
    liger, liger-compile      the same with Liger's kernels
    captured, captured-bf16   a LLaMA fused by hand with PyTorch, compiled and captured; the second,
                              with --use-amp, has bf16 weights over fp32 masters
    available                 all that can run here but FP8, captured or deterministic steps and
                              switches; the models that cannot are named

FP8, Liger and capture need a GPU. The metric energy needs an NVIDIA GPU.

A large GPU lowers its clock under load. `--load-seconds 10 --timed-seconds 10` times what it
sustains.

Writes benchmark.json (measured), and from it benchmark.csv and .md, into --output-dir. The exit
code is 1 if a model failed for another reason than memory, and the other models are measured all
the same.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from studies import benchmark, version_files
from studies.peers import known_models
from tracepage.files import writable_file, writable_folder
from tracepage.views.benchmark_suite import render_benchmark

AVAILABLE = "available"
PRESET = "preset"


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def sizes(text: str) -> list[int] | None:
    """None stands for the size of the preset."""
    return None if text == PRESET else cli.positive_list(text)


def main() -> int:
    parser = version_files.parser(__doc__, "--batch-size", "--seq-len", "--capture-step")
    add = parser.add_argument
    add("--models", type=names, default="v1,v2", help="or: available (default: v1,v2)")
    add("--batch-sizes", type=sizes, default="4,8,16,32", help="or: preset (default: 4,8,16,32)")
    add(
        "--seq-lengths", type=sizes, default="128,256,512", help="or: preset (default: 128,256,512)"
    )
    metrics = "throughput,memory,accuracy"
    add("--metrics", type=names, default=metrics, help="or: energy (default: the others)")
    add("--num-steps", type=cli.positive, default=5, help="timed, in each process (default: 5)")
    load = "steps before the timed ones, for at least so long (default: 0)"
    add("--load-seconds", type=cli.amount, default=0.0, help=load)
    timed = "timed steps, for at least so long; --metrics energy: 10 (default: 0)"
    add("--timed-seconds", type=cli.amount, default=0.0, help=timed)
    add("--trace-dir", type=Path, metavar="DIR", help="keep a trace of two steps of each model")
    add("--repeats", type=cli.positive, default=3, help="processes a cell, in turn (default: 3)")
    add("--timeout", type=cli.positive, default=600, help="seconds of a process (default: 600)")
    cli.add_output_dir(parser, "benchmark_suite")
    options = cli.parse(parser)
    known = known_models.find()
    preset = version_files.resolve(options)
    options.batch_sizes = options.batch_sizes or [preset.batch_size]
    options.seq_lengths = options.seq_lengths or [preset.seq_len]
    if options.models == [AVAILABLE]:
        options.models = known_models.available(options, known)
    models, shapes = benchmark.plan(options, known)
    if options.trace_dir:
        writable_folder(options.trace_dir, "--trace-dir")
    path = writable_file(options.output_dir / "benchmark.json", "--output-dir", (options.config,))
    code = benchmark.measure(options, models, shapes, next(iter(known.values())), path)
    print(f"\n{render_benchmark(path).publish(options.output_dir, 'benchmark')}")
    return code


if __name__ == "__main__":
    cli.command(main)
