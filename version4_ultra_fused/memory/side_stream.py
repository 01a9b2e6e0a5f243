"""Side streams: two streams for work that the rest of the backward pass does not need at once.

Only the optimizer waits for most of it. The embedding's backward pass waits for the sorted ids and
the head's gradient. In a captured step each stream becomes a branch of the graph: a small product
on it runs beside the kernels of the main stream, where either alone would leave multiprocessors
idle.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# pieces of work in flight; the main stream waits for an older one, and its tensors are given back
DEPTH = 8


class SideStream:
    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[[], object], *tensors: Tensor) -> torch.cuda.Event:
        """Runs `work`, which reads `tensors`, after all that the current stream has been given so
        far; the event is its end.
        """
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        done = self.stream.record_event()
        self.in_flight.append((done, tensors))
        if len(self.in_flight) > DEPTH:
            current.wait_event(self.in_flight.popleft()[0])
        return done

    def wait(self, other: "SideStream") -> None:
        """Makes this stream wait for all work that the other has been given so far."""
        self.stream.wait_stream(other.stream)

    def join(self) -> None:
        """Makes the current stream wait for all work."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.in_flight.clear()


class SideStreams(NamedTuple):
    products: SideStream  # which write gradients of matrices
    updates: SideStream  # of blocks, and the sums that are gradients of norms
