"""Problem 4 (accounting) of ../README.md: memory, bytes and time of data parallelism on paper, by
ZeRO stage.

Stage 0 is DDP. Stage 1 shards the optimizer's state, stage 2 the gradients as well, stage 3 the
weights as well; `fully_shard` is stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054).
"""


def state_bytes(
    parameters: int, ranks: int, stage: int, weight: int = 4, gradient: int = 4, optimizer: int = 8
) -> float:
    """Bytes of weights, gradients and optimizer state on one rank; the last three arguments are
    bytes of one parameter.
    """
    parts = [optimizer, gradient, weight]  # in the order in which the stages shard them
    return parameters * sum(part / ranks if stage > i else part for i, part in enumerate(parts))


def sent_bytes(parameters: int, ranks: int, stage: int, element: int = 4) -> float:
    """Bytes that one rank sends in a training step; an element of a weight or of a gradient has
    `element` bytes.
    """
    # Each pass is a reduce-scatter or an all-gather of all parameters.
    passes = 3 if stage == 3 else 2
    return passes * (ranks - 1) / ranks * parameters * element


def communication_seconds(sent: float, collectives: int, latency: float, bandwidth: float) -> float:
    """Seconds of collectives that run one after the other; latency of each in s, bus bandwidth in
    bytes/s.
    """
    return collectives * latency + sent / bandwidth


def exposed_seconds(communication: float, backward: float, buckets: int) -> float:
    """Seconds by which the communication outlasts the backward pass."""
    return max(communication / buckets, communication - backward * (buckets - 1) / buckets)
