"""A model on paper: the time of a training step on n GPUs, from the step on one GPU and a link. It measures nothing.

Letters: n GPUs, a link with latency a (s) and bandwidth b (bytes/s), x bytes of a whole tensor. Costs of collectives on a ring
(Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521; Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002):

    all-reduce                     2 (n - 1) (a + x / (n b))       so 2 (n - 1) / n of the bytes pass each link
    reduce-scatter, all-gather     (n - 1) (a + x / (n b))
    reduce, broadcast              (n - 1) a + x / b               in a pipeline of small pieces

G is the bytes of the gradients, W of the weights. Collectives of a step in each form:

    ddp      one all-reduce of G, in buckets of 25 MiB, beside the backward pass (Li et al. 2020, arXiv:2006.15704)
    zero1    one reduce-scatter of G, in such buckets, beside the backward pass; an all-gather of W after the update
             (Rajbhandari et al. 2020, arXiv:1910.02054)
    fsdp     an all-gather of W beside the forward pass; another, and a reduce-scatter of G, beside the backward pass; each in
             one piece a block and one for the rest (Zhao et al. 2023, arXiv:2304.11277)

What runs beside a pass of time T, in k equal pieces of time t each, becomes ready piece by piece while the pass goes on. All
pieces but the last overlap with it, as far as they fit, so the step becomes longer by

    exposed = max(t, k t - T (1 - 1/k))

What runs beside nothing is exposed whole. Let f, g and u be the times of forward pass, backward pass and update on one GPU, and
s the share of the one GPU's batch that each of n GPUs has: 1 in weak scaling, 1/n in strong scaling. Then

    step(n) = s (f + g) + u / m + exposed in the forward pass + exposed in the backward pass + the rest

where m is 1 in ddp and n where the update is sharded. The model leaves out

    waiting for a slow GPU
    multiprocessors and memory bandwidth that a collective takes from the kernels beside it
    the loss of efficiency of kernels as the batch shrinks
    trees, which on many GPUs have a smaller latency than rings
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

BUCKET = 25 * 2**20  # bytes of DistributedDataParallel's buckets
FLOAT = 4  # bytes
KINDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "reduce": 0, "broadcast": 0}  # rounds of the ring; 0: a pipeline

Beside = Literal["forward", "backward", "nothing"]


class Link(NamedTuple):
    """A link between two GPUs: 1e9 bytes/s in one direction, and the latency of a message in us."""

    gb_per_second: float
    microseconds: float


class Step(NamedTuple):
    """Milliseconds of the step on one GPU."""

    forward: float
    backward: float
    update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Transfer:
    """Collectives of a kind in a step."""

    kind: str  # of KINDS
    bytes: float  # of the whole tensors, all pieces together
    count: float  # of pieces
    beside: Beside  # the pass that they can overlap with


def transfers(form: str, parameters: int, layers: int) -> list[Transfer]:
    """The collectives of a step in a form (ddp, zero1 or fsdp), with float32 gradients and weights."""
    size, blocks = FLOAT * parameters, layers + 1
    buckets = math.ceil(size / BUCKET)
    return {
        "ddp": [Transfer("all_reduce", size, buckets, "backward")],
        "zero1": [Transfer("reduce_scatter", size, buckets, "backward"), Transfer("all_gather", size, 1, "nothing")],
        "fsdp": [
            Transfer("all_gather", size, blocks, "forward"), Transfer("all_gather", size, blocks, "backward"),
            Transfer("reduce_scatter", size, blocks, "backward"),
        ],
    }[form]  # fmt: skip


def transfer_ms(transfer: Transfer, processes: int, link: Link) -> float:
    """Milliseconds of all pieces of a transfer, one after the other; 0 on one GPU."""
    others, rounds = processes - 1, KINDS[transfer.kind]
    passing = (rounds * others / processes if rounds else min(1, others)) * transfer.bytes  # bytes over each link
    return (rounds or 1) * others * transfer.count * link.microseconds / 1e3 + passing / link.gb_per_second / 1e6


def exposed_ms(transfers: list[Transfer], processes: int, link: Link, window_ms: float) -> float:
    """Milliseconds by which transfers beside a pass of `window_ms` make the step longer; each has pieces of one size."""
    if not transfers:
        return 0.0
    pieces = max(1.0, *(transfer.count for transfer in transfers))
    whole = sum(transfer_ms(transfer, processes, link) for transfer in transfers)
    return max(whole / pieces, whole - window_ms * (1 - 1 / pieces))


def step_ms(form: str, transfers: list[Transfer], one: Step, processes: int, link: Link, share: float = 1.0) -> float:
    """Milliseconds of the step on so many GPUs, as the model has it; each has this share of the one GPU's batch."""
    passes = {"forward": share * one.forward, "backward": share * one.backward, "nothing": 0.0}
    grouped = {name: [transfer for transfer in transfers if transfer.beside == name] for name in passes}
    after = sum(transfer_ms(transfer, processes, link) for transfer in grouped.pop("nothing"))
    exposed = sum(exposed_ms(group, processes, link, passes[name]) for name, group in grouped.items())
    return sum(passes.values()) + one.update / (1 if form == "ddp" else processes) + exposed + after


def efficiency(one_ms: float, ms: float, share: float = 1.0) -> float:
    """Throughput over n times that of one GPU, for a step on n GPUs that each have this share of the one GPU's batch."""
    return share * one_ms / ms


def link_of(sizes: list[tuple[int, float]], processes: int) -> Link:
    """The link behind times of all-reduces on at least 2 GPUs, given as pairs of bytes and milliseconds.

    The latency is that of the smallest; the bandwidth is what passes each link in the largest, its latency included.
    """
    (_, least), (nbytes, most) = min(sizes), max(sizes)
    return Link(2 * (processes - 1) / processes * nbytes / most / 1e6, least * 1e3 / (2 * (processes - 1)))
