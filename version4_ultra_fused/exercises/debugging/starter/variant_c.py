"""Variant C: "Nobody needs to wait."

"At the end of the backward pass the main stream waited for the side streams. But the last thing there is the update of the
blocks, in order, behind the gradients that it reads. So I took the wait out, and the streams overlap across steps. Only your
harness refuses to capture this step, so I run it with --no-capture-step. Can you repair the capture?"
"""

from common.training.capture import Step
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.memory.side_stream import SideStream, SideStreams
from version4_ultra_fused.tiny_llama_v4 import CAPTURED, SWITCHES, TinyLlama, make_model, make_optimizer, train

__all__ = ["CAPTURED", "SWITCHES", "TinyLlama", "make_model", "make_optimizer", "make_step", "train"]


class Branch(SideStream):
    def join(self) -> None:
        """At the end of the backward pass; the tensors that work on the stream has read are given back."""
        self.in_flight.clear()


def make_step(model, optimizer, precision) -> Step:
    step = v4.make_step(model, optimizer, precision)
    if model.one.is_cuda and model.switches["memory-plan"]:
        model.plan.streams = SideStreams(Branch(), Branch())
    return step
