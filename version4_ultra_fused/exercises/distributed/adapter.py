"""Selects the files of the problems to test, and runs them on two processes of this machine, on the
CPU with gloo.

    pytest test_exercises.py                               # starter/, which you fill in
    KERNEL_EXERCISES=solution pytest test_exercises.py     # solution/

`run(job)` calls one of the jobs at the end of this file on every rank. A job builds its inputs,
calls your functions and returns arrays, which test_exercises.py compares with those of one process.
"""

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import exercise_tools as exercises

import numpy as np
import torch
import torch.distributed as dist
from small_model import SmallModel, random_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

load = functools.partial(exercises.load, Path(__file__).parent)
RANKS = 2
LIMIT = timedelta(seconds=60)  # a rank waits this long for the other
# AdamW divides by |g| + eps: a small eps would turn rounding of a tiny g into a large update
ADAMW = {"lr": 1e-2, "eps": 1e-4}
Arrays = dict[str, np.ndarray]


def _on_one_rank(rank: int, store_file: str, job: Callable, arguments: tuple) -> Any:
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
    try:
        # A job that fails at once does not leave while the other rank still connects.
        dist.barrier()
        return job(*arguments)
    finally:
        dist.destroy_process_group()


@functools.cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(RANKS, mp_context=get_context("spawn"))


def run(job: Callable, *arguments: object) -> list:
    """What the job returns on each rank, in the order of the ranks. Raises the error of a rank that
    failed by itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        futures = [
            _pool().submit(_on_one_rank, rank, store, job, arguments) for rank in range(RANKS)
        ]
        # This waits for the ranks.
        errors = list(filter(None, (future.exception() for future in futures)))
    if errors:
        # An error of gloo says that the other rank has left.
        raise min(errors, key=lambda error: "gloo" in str(error))
    return [future.result() for future in futures]


class Collectives(TorchDispatchMode):
    """Counts the collectives that run in its `with` block, by name: allreduce, broadcast,
    reduce_scatter, allgather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator.namespace == "c10d":
            self.calls[operator.overloadpacket.__name__.strip("_").removesuffix("_base")] += 1
        return operator(*arguments, **(keywords or {}))


def model(seed: int = 0) -> SmallModel:
    """The same weights for the same seed. The number of weights is odd, so two ranks cannot share
    them equally.
    """
    torch.manual_seed(seed)
    return SmallModel(vocabulary=62, hidden=15, ffn=20, layers=2)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Four sequences, [4, 6]."""
    return random_batch(step, vocabulary=62, batch=4, length=6)


def share(step: int = 0) -> list[Tensor]:
    """This rank's part of the batch."""
    return [part.chunk(RANKS)[dist.get_rank()] for part in batch(step)]


def arrays(named: Iterable[tuple[str, Tensor | None]]) -> Arrays:
    return {name: tensor.detach().numpy() for name, tensor in named if tensor is not None}


def gradients(model: SmallModel) -> Arrays:
    return arrays((name, parameter.grad) for name, parameter in model.named_parameters())


def broadcast() -> Arrays:
    """Problem 1: the weights after a broadcast. Each rank begins with weights of its own."""
    ours = model(seed=dist.get_rank())
    load("problem1_flat").broadcast_weights(ours)
    return arrays(ours.named_parameters())


def average() -> tuple[Arrays, Counter]:
    """Problem 1: the averaged gradients, and the collectives."""
    ours = model()
    ours(*share()).backward()
    with Collectives() as counted:
        load("problem1_flat").average_gradients(ours)
    return gradients(ours), counted.calls


def overlap(bucket_bytes: int) -> tuple[Arrays, Counter, int, int]:
    """Problem 2: gradients of the second step, its collectives, those begun before the last
    gradient, and how many buckets.
    """
    problem = load("problem2_overlap")
    ours = model()
    counted = Collectives()
    before_last = []
    # These hooks run before yours; the last that runs is that of the last gradient.
    for parameter in ours.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: before_last.append(counted.calls.total())
        )
    overlapped = problem.OverlappedGradients(ours, bucket_bytes)
    for step in range(2):
        counted.calls.clear()
        ours.zero_grad()
        with counted:
            ours(*share(step)).backward()
            overlapped.finish()
    buckets = problem.fill_buckets(list(ours.parameters()), bucket_bytes)
    return gradients(ours), counted.calls, before_last[-1], len(buckets)


def train_sharded(steps: int) -> tuple[Arrays, Counter, int]:
    """Problem 3: weights after some steps, the collectives of the last, and the elements of AdamW's
    moments on this rank.
    """
    ours = model()
    optimizer = load("problem3_zero1").ShardedAdamW(ours, **ADAMW)
    for step in range(steps):
        ours.zero_grad()
        ours(*share(step)).backward()
        with Collectives() as counted:
            optimizer.step()
    moments = [
        tensor
        for state in optimizer.optimizer.state.values()
        for tensor in state.values()
        if tensor.dim()
    ]
    return arrays(ours.named_parameters()), counted.calls, sum(moment.numel() for moment in moments)
