"""Trains Version 1 with varying sequence lengths, and shows what a GPU's memory pool holds.

    python exercises/fragmentation.py --preset small --seq-len 512   # needs a GPU; a minute

Every kind of lengths begins with an empty pool. fragmentation.json has the rows.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of this clone

from common import cli
from common import device as devices
from common.options import Options
from common.precision import Precision, amp_dtype
from common.training import record
from studies import version_files
from tracepage.errors import UsageError
from tracepage.files import write_measurement
from tracepage.show import tables
from version1_pytorch_baseline import tiny_llama_v1

import torch

STEPS = 60
MULTIPLE = 64


def lengths_of_steps(longest: int, seed: int) -> dict[str, list[int]]:
    """The sequence length of each of STEPS steps, by kind; all have the longest at least once."""
    generator = random.Random(seed)
    varying = [generator.randint(longest // 8, longest) for _ in range(STEPS - 1)]
    rounded = [min(longest, -(-length // MULTIPLE) * MULTIPLE) for length in varying]
    return {
        "one length": [longest] * STEPS,
        "varying": [*varying, longest],
        "varying, the longest first": [longest, *varying],
        f"rounded up to {MULTIPLE}s": [*rounded, longest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add(parser, "--preset", "--batch-size", "--seq-len", "--use-amp", "--seed")
    options = cli.resolve(Options, cli.parse(parser))
    device = devices.select("auto")
    if not devices.is_gpu(device):
        raise UsageError("fragmentation.py reads the pool of a GPU's memory: it needs a GPU")
    devices.configure(device, options.seed)
    precision = Precision(device, amp_dtype(options))
    model = tiny_llama_v1.make_model(options).to(device)
    optimizer = tiny_llama_v1.make_optimizer(model, options)
    step = tiny_llama_v1.make_step(model, optimizer, precision)
    ids, targets = version_files.random_batch(options, device)
    step((ids, targets))  # AdamW's moments and the libraries' workspaces stay.
    pools = []
    rows = []
    for kind, lengths in lengths_of_steps(options.seq_len, options.seed).items():
        torch.cuda.empty_cache()
        devices.reset_peak_memory(device)
        for length in lengths:
            step((ids[:, :length].contiguous(), targets[:, :length].contiguous()))
        memory = devices.peak_memory(device)
        free = memory["reserved_mib"] - memory["peak_mib"]
        share = 100 * free / memory["reserved_mib"]
        pools.append({"lengths": kind, **memory, "free_mib": free, "free_percent": share})
        rows.append([kind, memory["peak_mib"], memory["reserved_mib"], free, share])
    schema = "tiny-llama-fragmentation/1"
    measured = record.header(schema, device, precision.name, model=options.model)
    measured["training"] = {"batch_size": options.batch_size, "longest": options.seq_len}
    measured["pools"] = pools
    write_measurement(Path("fragmentation.json"), measured, "fragmentation.json")
    header = ["lengths", "allocated MiB", "reserved MiB", "not allocated MiB", "% of reserved"]
    print(tables.text(header, rows))


if __name__ == "__main__":
    cli.command(main)
