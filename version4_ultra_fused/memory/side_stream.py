"""Side streams: two streams for work that the rest of the backward pass does not need at once.

Only the optimizer waits for most of it. The embedding's backward pass waits for the sorted ids and
the head's gradient. In a captured step each stream becomes a branch of the graph: a small product
on it runs beside the kernels of the main stream, where either alone would leave multiprocessors
idle.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from version4_ultra_fused import trials

import torch
from torch import Tensor

# Pieces of work in flight: the main stream waits for an older one, and its tensors are given back.
DEPTH = trials.numbers("DEPTH", 8)[0]
Work = Callable[[], object]


class SideStream:
    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(
        self, work: Work, *tensors: Tensor, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Runs `work`, which reads `tensors`, after the event, or after all that the current stream
        has been given so far; the event is its end.
        """
        current = torch.cuda.current_stream()
        if after:
            self.stream.wait_event(after)
        else:
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
    products: SideStream  # It writes gradients of matrices.
    updates: SideStream  # It updates blocks, and sums the gradients of norms.


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
        # (stream, parameter, event, work, tensors): to be issued after a later kernel of the main
        # stream, which is then the first that its event releases.
        self.held: list = []

    def begin(self, beside: bool) -> None:
        """Begins a step, with side streams or without."""
        if beside:
            self.streams = self.streams or SideStreams(SideStream(), SideStream())
        self.beside = self.streams if beside else None
        self.held.clear()
        self.waiting.clear()  # A step before may have ended in an error.

    def join(self) -> None:
        """Makes the current stream wait for the side streams."""
        self.release()
        for stream in self.beside or ():
            stream.join()

    def end(self) -> None:
        self.beside = None
        self.written.clear()

    def on_products(self, parameter: Tensor | None, work: Work, *tensors: Tensor) -> None:
        """Does work that reads `tensors` and writes the gradient of `parameter`, if any."""
        if not self.beside:
            work()
            return
        self._hold(self.beside.products, parameter, work, tensors)

    def on_updates(self, work: Work, *tensors: Tensor) -> None:
        if self.beside:
            self._hold(self.beside.updates, None, work, tensors)
        else:
            work()

    def _hold(self, stream, parameter: Tensor | None, work: Work, tensors) -> None:
        event = torch.cuda.current_stream().record_event() if self.HOLDS else None
        self.held.append((stream, parameter, event, work, tensors))
        if not self.HOLDS:
            self.release()

    @property
    def HOLDS(self):
        return bool({"order", "late"} & trials.ON)

    def issued(self, last: bool = False) -> None:
        """To be called when the main stream has been given a kernel after work was held; `last`:
        the last one before a norm's gradient.
        """
        if last or "late" not in trials.ON:
            self.release()

    def release(self) -> None:
        """Issues what is held."""
        held, self.held = self.held, []
        for stream, parameter, event, work, tensors in held:
            if "late" in trials.ON:
                event = held[-1][2]
            done = stream.run(work, *tensors, after=event)
            if parameter is not None:
                self.written[parameter] = done

    def wait_for(self, parameter: Tensor) -> None:
        """Makes the current stream wait until the gradient of `parameter` is written."""
        if parameter not in self.written:
            self.release()
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
