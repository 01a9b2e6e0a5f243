"""Measures your functions on several processes: NCCL (RCCL) with one GPU a process, or gloo on a CPU. torchrun starts it.

    torchrun --standalone --nproc-per-node 2 measure.py steps layer

    steps    problems 1 to 3: the step time of the small model, without communication and with each form of it
    layer    problem 4: forward and backward of one feed-forward layer, whole on each rank and split over the ranks

What you have not written yet is named and left out.
KERNEL_EXERCISES=solution measures the solutions. Times are the median over --num-steps, with the 20th and 80th percentile.
A step without communication trains each rank alone: it is what the other steps would take if communication were free.
"""

import argparse
import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import functools
from argparse import Namespace
from collections.abc import Callable, Iterable

from common import cli, ranks
from common import device as devices
from common.analysis.output import tables
from common.errors import UsageError
from common.timing import benchmark, summarize
from common.training import distributed

import adapter
import torch
import torch.distributed as dist
from small_model import FeedForward, SmallModel, random_batch
from torch import Tensor, nn

Step = Callable[[], object]
VOCABULARY, BUCKET_BYTES = 1000, 25 * 2**20
STEPS = ("no communication", "flat", "overlap", "zero1")


def after_backward(form: str, model: SmallModel) -> list[Step]:
    """What a step of this form calls after its backward pass."""
    if form == "zero1":
        return [adapter.load("problem3_zero1").ShardedAdamW(model, lr=1e-3).step]
    update = torch.optim.AdamW(model.parameters(), lr=1e-3).step
    if form == "overlap":
        return [adapter.load("problem2_overlap").OverlappedGradients(model, BUCKET_BYTES).finish, update]
    if form == "flat":
        return [functools.partial(adapter.load("problem1_flat").average_gradients, model), update]
    return [update]


def train(model: SmallModel, batch: list[Tensor], calls: list[Step]) -> None:
    model.zero_grad()
    model(*batch).backward()
    for call in calls:
        call()


def measure(
    forms: Iterable[str], step_of: Callable[[str], Callable[[], object]], options: Namespace, device: torch.device
) -> None:
    """Prints median, 20th and 80th percentile of each form's step, which all ranks begin together."""
    rows = []
    for form in forms:
        try:
            step = step_of(form)
            dist.barrier()
            times = summarize(benchmark(step, device, iterations=options.num_steps))
        except NotImplementedError as error:  # on all ranks
            rows.append([form, f"not written: {error}", "", ""])
        else:
            rows.append([form, *(f"{times[key]:.3g}" for key in ("median", "p20", "p80"))])
    if dist.get_rank() == 0:
        print(tables.text(["step", "ms", "p20", "p80"], rows))


def steps(options: Namespace, device: torch.device) -> None:
    def step_of(form: str) -> Step:
        torch.manual_seed(0)
        model = SmallModel(VOCABULARY, options.hidden_dim, 4 * options.hidden_dim, options.num_layers).to(device)
        batch = random_batch(dist.get_rank(), VOCABULARY, options.batch_size, options.seq_len)
        return functools.partial(train, model, [part.to(device) for part in batch], after_backward(form, model))

    measure(STEPS, step_of, options, device)


def forward_and_backward(layer: nn.Module, x: Tensor) -> None:
    layer(x).backward(x)


def layer(options: Namespace, device: torch.device) -> None:
    torch.manual_seed(0)  # the same layer and the same tokens on all ranks
    whole = FeedForward(options.hidden_dim, 4 * options.hidden_dim).to(device)
    x = torch.randn(options.batch_size * options.seq_len, options.hidden_dim, device=device, requires_grad=True)

    def step_of(form: str) -> Step:
        if form == "whole":
            return functools.partial(forward_and_backward, whole, x)
        split = adapter.load("problem4_tensor_parallel").ParallelFeedForward(whole).to(device)
        return functools.partial(forward_and_backward, split, x)

    if dist.get_rank() == 0:
        print(f"each of the two all-reduces: {x.nbytes:,} bytes")
    measure(("whole", "split"), step_of, options, device)


MEASUREMENTS = {"steps": steps, "layer": layer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", nargs="+", choices=MEASUREMENTS, help="what to measure")
    cli.add(parser, "--device")
    parser.add_argument("--num-steps", type=cli.positive, default=20, metavar="N", help="timed repeats (default: 20)")
    parser.add_argument("--batch-size", type=cli.positive, default=8, metavar="B", help="sequences of a rank (default: 8)")
    parser.add_argument("--seq-len", type=cli.positive, default=512, metavar="S", help="default: 512")
    parser.add_argument("--hidden-dim", type=cli.positive, default=1024, metavar="D", help="default: 1024; F is four times D")
    parser.add_argument("--num-layers", type=cli.positive, default=12, metavar="L", help="default: 12")
    options = cli.parse(parser)
    here, device = ranks.here(), devices.select(options.device)
    if not here.launched:
        raise UsageError("start it with torchrun: torchrun --standalone --nproc-per-node 2 measure.py steps layer")
    distributed.start(device, timeout=600)
    if here.main_process:
        print(f"{here.world_size} processes, {dist.get_backend()}, {devices.describe(device)['name']}, torch {torch.__version__}")
    for name in options.measurements:
        MEASUREMENTS[name](options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.command(main)
