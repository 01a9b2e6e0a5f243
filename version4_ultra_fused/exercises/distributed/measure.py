"""Measures your functions on several processes: NCCL (RCCL) with one GPU a process, or gloo on a
CPU. torchrun starts it.

    torchrun --standalone --nproc-per-node 2 measure.py

It times a step of the small model without communication, and with each form of problems 1 to 3;
median over --num-steps. What you have not written yet is named and left out.
KERNEL_EXERCISES=solution measures the solutions. A step without communication trains each rank
alone: it is what the other steps would take if communication were free.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import functools
from argparse import Namespace
from collections.abc import Callable

from common import cli, ranks
from common import device as devices
from common.timing import benchmark, summarize
from common.training import distributed
from tracepage.errors import UsageError
from tracepage.show import tables

import adapter
import torch
import torch.distributed as dist
from small_model import SmallModel, random_batch

Step = Callable[[], object]
VOCABULARY = 1000
BUCKET_BYTES = 25 * 2**20
STEPS = ("no communication", "flat", "overlap", "zero1")


def after_backward(form: str, model: SmallModel) -> list[Step]:
    """What a step of this form calls after its backward pass."""
    if form == "zero1":
        return [adapter.load("problem3_zero1").ShardedAdamW(model, lr=1e-3).step]
    update = torch.optim.AdamW(model.parameters(), lr=1e-3).step
    if form == "overlap":
        return [
            adapter.load("problem2_overlap").OverlappedGradients(model, BUCKET_BYTES).finish,
            update,
        ]
    if form == "flat":
        return [functools.partial(adapter.load("problem1_flat").average_gradients, model), update]
    return [update]


def step_of(form: str, options: Namespace, device: torch.device) -> Step:
    torch.manual_seed(0)
    model = SmallModel(
        VOCABULARY, options.hidden_dim, 4 * options.hidden_dim, options.num_layers
    ).to(device)
    batch = random_batch(dist.get_rank(), VOCABULARY, options.batch_size, options.seq_len)
    ids, targets = (part.to(device) for part in batch)
    calls = after_backward(form, model)

    def step() -> None:
        model.zero_grad()
        model(ids, targets).backward()
        for call in calls:
            call()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add(parser, "--device")
    add = functools.partial(parser.add_argument, type=cli.positive)
    add("--num-steps", default=20, metavar="N", help="timed repeats (default: 20)")
    add("--batch-size", default=8, metavar="B", help="sequences of a rank (default: 8)")
    add("--seq-len", default=512, metavar="S", help="default: 512")
    add("--hidden-dim", default=1024, metavar="D", help="default: 1024; F is four times D")
    add("--num-layers", default=12, metavar="L", help="default: 12")
    options = cli.parse(parser)
    process = ranks.here()
    device = devices.select(options.device)
    if not process.launched:
        raise UsageError(
            "start it with torchrun: torchrun --standalone --nproc-per-node 2 measure.py"
        )
    distributed.start(device, timeout=600)
    if process.main_process:
        print(
            f"{process.world_size} processes, {dist.get_backend()}, "
            f"{devices.describe(device)['name']}, torch {torch.__version__}"
        )
    rows = []
    for form in STEPS:
        try:
            step = step_of(form, options, device)
            dist.barrier()  # all ranks begin together
            times = summarize(benchmark(step, device, iterations=options.num_steps))
            rows.append([form, f"{times['median']:.3g}"])
        except NotImplementedError as error:  # on all ranks
            rows.append([form, f"not written: {error}"])
    if process.main_process:
        print(tables.text(["step", "ms"], rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.command(main)
