"""Which work of Version 4's step waits for which on its three streams, from streams that only note
what precedes what.
"""

from collections.abc import Callable
from contextlib import contextmanager

from common.precision import Precision
from tests.models import FP8 as CONFIG
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.kernels import REFERENCE, attention
from version4_ultra_fused.memory.optimizer import MasterAdamW
from version4_ultra_fused.memory.side_stream import Schedule, SideStream

import pytest
import torch

BF16 = Precision(torch.device("cpu"), torch.bfloat16)
Works = set[str]


class Stream:
    """What has been given to it, and what that waits for; an event is a copy of this."""

    def __init__(self) -> None:
        self.works: Works = set()

    def record_event(self) -> Works:
        return set(self.works)

    def wait_event(self, event: Works) -> None:
        self.works |= event

    def wait_stream(self, other: "Stream") -> None:
        self.works |= other.works


class Streams:
    """The streams of a step, and by the name of each work the works that precede it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = self.current = Stream()
        self.before: dict[str, Works] = {}
        self.held: list[tuple[torch.Tensor, ...]] = []
        begin = Schedule.begin
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(Schedule, "begin", lambda schedule, beside: begin(schedule, True))

    @contextmanager
    def inside(self, stream: Stream):
        outside, self.current = self.current, stream
        yield
        self.current = outside

    def note(self, name: str) -> None:
        self.before[name] = set(self.current.works)
        self.current.works.add(name)

    def noted(self, operation: Callable, name: str) -> Callable:
        """The operation, noted as `name` and how often it was called before."""
        calls = iter(range(99))

        def call(*arguments, **named):
            self.note(f"{name} {next(calls)}")
            return operation(*arguments, **named)

        return call


@pytest.fixture
def stepped(monkeypatch) -> Callable[[bool], tuple[Streams, MasterAdamW]]:
    """stepped(fp8): a step of a model of two layers."""

    def step(fp8: bool) -> tuple[Streams, MasterAdamW]:
        streams = Streams(monkeypatch)
        switches = tiny_llama_v4.SWITCHES | {"fp8": fp8}
        model = tiny_llama_v4.TinyLlama(CONFIG, switches, REFERENCE)
        names = ("swiglu_backward", "product_norm_backward", "rotate_back", "cross_entropy")
        operations = model.operations
        model.operations = operations._replace(
            **{name: streams.noted(getattr(operations, name), name) for name in names}
        )
        optimizer = MasterAdamW(model, lr=1e-3)
        run = tiny_llama_v4.make_step(model, optimizer, BF16)
        parameters = {parameter: name for name, parameter in model.named_parameters()}
        modules = {module: name for name, module in model.named_modules()}
        on_products, update, run_beside = (
            Schedule.on_products,
            optimizer.update_sublayer,
            SideStream.run,
        )

        def noted_products(schedule, parameter, work, *tensors, after=None):
            def noted_work():
                streams.note(parameters.get(parameter, "sort"))
                work()

            on_products(schedule, parameter, noted_work, *tensors, after=after)

        def noted_update(sublayer):
            streams.note(modules[sublayer])
            update(sublayer)

        def noted_run(stream, work, *tensors, after=None):
            streams.held.append(tensors)
            return run_beside(stream, work, *tensors, after=after)

        monkeypatch.setattr(attention, "form", lambda *_: "library")
        monkeypatch.setattr(Schedule, "on_products", noted_products)
        monkeypatch.setattr(SideStream, "run", noted_run)
        monkeypatch.setattr(model.plan, "update_sublayer", noted_update)
        generator = torch.Generator().manual_seed(0)
        ids, targets = torch.randint(64, (2, 2, 16), generator=generator)
        run((ids, targets))
        return streams, optimizer

    return step


def test_weights_are_updated_after_their_gradients_and_their_last_reader(stepped):
    streams, _ = stepped(False)
    # The backward pass reaches the feed-forward network of the last layer first.
    order = ["layers.1.mlp", "layers.1.self_attn", "layers.0.mlp", "layers.0.self_attn"]
    for number, sublayer in enumerate(order):
        gradients = {name for name in streams.before if name.startswith(f"{sublayer}.")}
        assert len(gradients) == 2
        assert gradients | {f"product_norm_backward {number}"} <= streams.before[sublayer]
    assert {*streams.before} == streams.main.works


def test_a_weights_gradient_may_begin_beside_the_next_kernel_of_the_main_stream(stepped):
    streams, _ = stepped(False)
    for number, layer in enumerate((1, 0)):
        gate_up = streams.before[f"layers.{layer}.mlp.gate_up_proj.weight"]
        qkv = streams.before[f"layers.{layer}.self_attn.qkv_proj.weight"]
        assert f"swiglu_backward {number}" in gate_up
        assert f"product_norm_backward {2 * number}" not in gate_up
        assert f"product_norm_backward {2 * number}" in qkv
        assert f"product_norm_backward {2 * number + 1}" not in qkv
    # The head's, which follows the sorted ids on the same stream, waits for the loss.
    assert {"cross_entropy 0", "sort"} <= streams.before["embed_tokens.weight"]


def test_what_work_on_a_side_stream_reads_is_kept_until_its_end(stepped):
    """In FP8 also the scale of the gradient of logits, which no buffer holds."""
    streams, optimizer = stepped(True)
    scales = optimizer.scales
    kept = {tensor.data_ptr() for tensors in streams.held for tensor in tensors}
    own = scales.scale.untyped_storage()
    fresh = [
        tensor
        for tensors in streams.held
        for tensor in tensors
        if tensor.numel() == 1 and tensor.untyped_storage().data_ptr() != own.data_ptr()
    ]
    assert len(fresh) == 1 and fresh[0].item() == pytest.approx(2.0**-15 / 32)
    assert {
        scales.slot(weight, 2).scale.data_ptr() for weight in optimizer.matrices.parameters
    } <= kept
