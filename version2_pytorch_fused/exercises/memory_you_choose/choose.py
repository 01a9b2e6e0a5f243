"""Shows what your functions predict, who holds the peak of a snapshot, and trains Version 2 with your policy.

    python choose.py --preset medium --limit-gib 16
    python choose.py --snapshot ../../../results/h100/memory_snapshot_v2_medium.json
    python choose.py --train --preset tiny --num-steps 20            # what follows --train are flags of tiny_llama_v2.py

KERNEL_EXERCISES=solution in front of a command takes the solution.
"""

import argparse
import bisect
import functools
import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli, exercises, files, recompute
from common.options import Options
from common.training import version_files
from version2_pytorch_fused import tiny_llama_v2

from torch.utils.checkpoint import create_selective_checkpoint_contexts

LONGEST = 2**24  # tokens


def with_policy(policy, options: Options) -> tiny_llama_v2.TinyLlama:
    model = tiny_llama_v2.make_model(options)
    recompute.recompute(model, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    return model


def predict(memory, options: Options, limit: float) -> None:
    batch, length, model = options.batch_size, options.seq_len, options.model
    print(f"{'kind':<12}{f'MiB at {batch} x {length}':>18}{'largest batch':>15}{'longest sequence':>18}")
    for kind in ("none", "block", "selective"):
        peak = functools.partial(memory.peak_bytes, model, kind=kind)
        tokens = bisect.bisect_right(range(1, LONGEST), limit * 2**30, key=peak)
        print(f"{kind:<12}{peak(batch * length) / 2**20:18,.0f}{tokens // length:15,}{tokens:18,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add(parser, "--preset", "--batch-size", "--seq-len")
    parser.add_argument("--limit-gib", type=float, default=16, metavar="G", help="memory of the GPU (default: 16)")
    parser.add_argument("--snapshot", type=Path, metavar="FILE.json", help="show who holds its peak")
    parser.add_argument("--train", nargs=argparse.REMAINDER, metavar="FLAG", help="train Version 2 with your policy")
    arguments = cli.parse(parser)
    memory = exercises.load(Path(__file__).parent, "memory")
    if arguments.train is not None:
        own = version_files.run_parser(tiny_llama_v2, None)
        options = version_files.run_options(tiny_llama_v2, cli.parse(own, arguments.train))
        return tiny_llama_v2.train(options, functools.partial(with_policy, memory.policy)).exit_code
    if arguments.snapshot:
        for place, size in memory.holders(files.read_json(arguments.snapshot)).most_common(12):
            print(f"{size / 2**20:8,.0f} MiB  {place}")
    else:
        predict(memory, cli.resolve(Options, arguments), arguments.limit_gib)
    return 0


if __name__ == "__main__":
    cli.command(main)
