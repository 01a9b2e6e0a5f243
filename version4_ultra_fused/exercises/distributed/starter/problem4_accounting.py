"""Problem 4 (accounting) of ../README.md: memory, bytes and time of data parallelism on paper, by
ZeRO stage.

Stage 0 is DDP. Stage 1 shards the optimizer's state, stage 2 the gradients as well, stage 3 the
weights as well; `fully_shard` is stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054).

Replace each line that names its problem, and run `pytest test_exercises.py -k problem4` in the
folder above.
"""


def state_bytes(
    parameters: int, ranks: int, stage: int, weight: int = 4, gradient: int = 4, optimizer: int = 8
) -> float:
    """Bytes of weights, gradients and optimizer state on one rank; the last three arguments are
    bytes of one parameter.
    """
    raise NotImplementedError("state_bytes: problem 4 of README.md")


def sent_bytes(parameters: int, ranks: int, stage: int, element: int = 4) -> float:
    """Bytes that one rank sends in a training step; an element of a weight or of a gradient has
    `element` bytes.
    """
    raise NotImplementedError("sent_bytes: problem 4 of README.md")


def communication_seconds(sent: float, collectives: int, latency: float, bandwidth: float) -> float:
    """Seconds of collectives that run one after the other; latency of each in s, bus bandwidth in
    bytes/s.
    """
    raise NotImplementedError("communication_seconds: problem 4 of README.md")


def exposed_seconds(communication: float, backward: float, buckets: int) -> float:
    """Seconds by which the communication outlasts the backward pass.

    Bucket i of k is ready after (i + 1) / k of the backward pass. Each bucket takes 1 / k of the
    communication, and they run one after the other.
    """
    raise NotImplementedError("exposed_seconds: problem 4 of README.md")
