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

# Pieces of work in flight: the main stream waits for an older one, and its tensors are given back.
DEPTH = 8
Work = Callable[[], object]


class SideStream:
    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(
        self, work: Work, *tensors: Tensor, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Runs `work`, which reads `tensors`, after an event, or after all that the current stream
        has been given so far; the returned event is its end.
        """
        current = torch.cuda.current_stream()
        self.stream.wait_event(after or current.record_event())
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
    products: SideStream  # It writes gradients of matrices.
    updates: SideStream  # It updates weights, and sums the gradients of norms.


class Schedule:
    """Which stream does a piece of work: a side stream in a step that has some, or else the main
    one, at once.

    Attributes:
        beside: the side streams of the step under way, or None.
        waiting: work that only the backward pass needs, with the tensors that it reads.
        written: by parameter, the event after which its gradient is there, in this step.
    """

    def __init__(self) -> None:
        # They stay for all steps, because a library has a workspace for each stream.
        self.streams: SideStreams | None = None
        self.beside: SideStreams | None = None
        self.waiting: list[tuple[Work, tuple[Tensor, ...]]] = []
        self.written: dict[Tensor, torch.cuda.Event] = {}

    def begin(self, beside: bool) -> None:
        """Begins a step, with side streams or without."""
        if beside:
            self.streams = self.streams or SideStreams(SideStream(), SideStream())
        self.beside = self.streams if beside else None
        self.waiting.clear()  # A step before may have ended in an error.

    def join(self) -> None:
        """Makes the current stream wait for the side streams."""
        for stream in self.beside or ():
            stream.join()

    def end(self) -> None:
        self.beside = None
        self.written.clear()

    def mark(self) -> torch.cuda.Event | None:
        """The end of all that the main stream has been given so far, or None without side streams.

        Work that a side stream may begin there is best issued after the main stream's next kernel,
        on which all that follows waits: of two kernels that may begin at once, the one that was
        issued first gets the multiprocessors.
        """
        return torch.cuda.current_stream().record_event() if self.beside else None

    def on_products(
        self,
        parameter: Tensor | None,
        work: Work,
        *tensors: Tensor,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Does work that reads `tensors` and writes the gradient of `parameter`, if any; `after` is
        of `mark`.
        """
        if not self.beside:
            work()
            return
        done = self.beside.products.run(work, *tensors, after=after)
        if parameter is not None:
            self.written[parameter] = done

    def on_updates(self, work: Work, *tensors: Tensor) -> None:
        if self.beside:
            self.beside.updates.run(work, *tensors)
        else:
            work()

    def wait_for(self, parameter: Tensor) -> None:
        """Makes the current stream wait until the gradient of `parameter` is written."""
        if parameter in self.written:
            torch.cuda.current_stream().wait_event(self.written[parameter])

    def at_the_loss(self, work: Work, *tensors: Tensor) -> None:
        """Keeps work that reads `tensors` for `run_waiting`."""
        self.waiting.append((work, tensors))

    def run_waiting(self) -> None:
        """To be called when all blocks of the forward pass have been issued."""
        for work, tensors in self.waiting:
            self.on_products(None, work, *tensors)
        self.waiting.clear()
