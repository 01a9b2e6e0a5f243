"""Variant C, repaired: the main stream waits for all work on the side streams before it goes on."""

from common.training.capture import Step
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.memory.side_stream import SideStream, SideStreams
from version4_ultra_fused.tiny_llama_v4 import CAPTURED, SWITCHES, TinyLlama, make_model, make_optimizer, train

import torch

__all__ = ["CAPTURED", "SWITCHES", "TinyLlama", "make_model", "make_optimizer", "make_step", "train"]


class Branch(SideStream):
    def join(self) -> None:
        """At the end of the backward pass; the tensors that work on the stream has read are given back."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.in_flight.clear()


def make_step(model, optimizer, precision) -> Step:
    step = v4.make_step(model, optimizer, precision)
    if model.one.is_cuda and model.switches["memory-plan"]:
        model.plan.streams = SideStreams(Branch(), Branch())
    return step
