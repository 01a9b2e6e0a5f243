"""MasterAdamW beside torch.optim.AdamW, in PyTorch's form of the update."""

from common import ranks
from common.precision import Precision
from tests import models
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.memory.optimizer import MasterAdamW

import pytest
import torch
import torch.distributed as dist

RATE = dict(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


def pair() -> tuple[torch.nn.Module, MasterAdamW, list[torch.nn.Parameter], torch.optim.AdamW]:
    """A model with its optimizer, and the same weights with PyTorch's."""
    model = models.build(tiny_llama_v4)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = MasterAdamW(model, **RATE)
    optimizer.plan_memory(torch.float32)
    return model, optimizer, copies, torch.optim.AdamW(copies, **RATE)


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Normally distributed gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        model.plan.buffers.gradient[parameter].copy_(
            torch.randn(parameter.shape, generator=generator)
        )


@pytest.mark.parametrize("early", [0, 1, 3, 4], ids="{} sublayers early".format)
def test_three_steps_are_pytorchs(early):
    """Whichever sublayers are updated before the rest."""
    model, ours, copies, theirs = pair()
    for _ in range(3):
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            copy.grad = torch.randn_like(copy)
            model.plan.buffers.gradient[parameter].copy_(copy.grad)
        for sublayer in list(reversed(ours.sublayers))[:early]:
            ours.update_sublayer(sublayer)
        ours.step()
        theirs.step()
    for parameter, copy in zip(model.parameters(), copies, strict=True):
        torch.testing.assert_close(parameter, copy, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.state[parameter]["exp_avg"], theirs.state[copy]["exp_avg"])
    assert ours.steps == 3


def test_the_gradient_of_two_processes_is_their_mean(monkeypatch):
    """Weights would hardly tell: AdamW divides its gradient's size out."""
    model, ours, copies, theirs = pair()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda gradient: gradient.mul_(2))  # Both have it.
    ours.communicate("ddp")
    for parameter, copy in zip(model.parameters(), copies, strict=True):
        copy.grad = torch.randn_like(copy)
        model.plan.buffers.gradient[parameter].copy_(copy.grad)
    ours.step()
    theirs.step()
    for parameter, copy in zip(model.parameters(), copies, strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[parameter][moment], theirs.state[copy][moment])


def test_moments_in_bf16_train_nearly_alike_and_take_half_the_memory(no_kernels):
    losses, sizes = [], []
    for on in (False, True):
        switches = tiny_llama_v4.SWITCHES | {"bf16-moments": on}
        model = models.build(tiny_llama_v4, switches)
        optimizer = MasterAdamW(model, lr=1e-2)
        step = tiny_llama_v4.make_step(model, optimizer, Precision(torch.device("cpu"), None))
        losses.append([step(models.batch()).item() for _ in range(20)])
        flats = (optimizer.matrices, optimizer.others)
        sizes.append(sum(flat.exp_avg.nbytes + flat.exp_avg_sq.nbytes for flat in flats))
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=0.05)
    assert losses[1][-1] < losses[1][0] - 1 and sizes[0] == 2 * sizes[1]


def test_every_parameter_draws_random_bits_of_its_own(monkeypatch, no_kernels):
    """The numbers of parameters whose updates are one launch each, over all launches."""
    model = models.build(tiny_llama_v4)
    optimizer = MasterAdamW(model, lr=1e-2)
    seen: list[int] = []

    def adamw(weight, *given, start, **named):
        seen.extend(range(start, start + weight.numel()))

    optimizer.plan_memory(torch.float32)
    model.operations = model.operations._replace(adamw=adamw)
    optimizer.update_sublayer(model.layers[1].mlp)
    optimizer.step()
    assert sorted(seen) == list(range(len(seen)))


def shared_out(monkeypatch, processes: int) -> list:
    """The optimizer of each process under zero1, of models alike."""
    monkeypatch.setattr(ranks, "here", lambda: ranks.Ranks(0, 0, processes, True))
    monkeypatch.setattr(dist, "get_world_size", lambda: processes)
    optimizers = []
    for rank in range(processes):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        optimizers.append(pair()[1])
        optimizers[-1].communicate("zero1")
    return optimizers


@pytest.mark.parametrize("processes", [2, 3, 5, 8])
def test_under_zero1_one_process_updates_an_element_and_moments_are_shared_out(
    monkeypatch, processes
):
    optimizers = shared_out(monkeypatch, processes)
    for kind in ("matrices", "others"):
        flats = [getattr(optimizer, kind) for optimizer in optimizers]
        seen = [
            torch.zeros(parameter.numel(), dtype=torch.int) for parameter in flats[0].parameters
        ]
        places = {id(parameter): i for flat in flats for i, parameter in enumerate(flat.parameters)}
        for flat in flats:
            for parameter, elements, (exp_avg, exp_avg_sq) in flat.fragments():
                seen[places[id(parameter)]][elements] += 1
                assert exp_avg.numel() == exp_avg_sq.numel() == elements.stop - elements.start
            assert len(flat.exp_avg) == len(flat.exp_avg_sq) == len(flat.master) / processes
        assert all((times == 1).all() for times in seen)


def test_states_that_were_shared_out_are_taken_back(monkeypatch):
    """What a checkpoint of all processes holds, each takes its part of, wherever it begins in a
    tensor.
    """
    for optimizer in shared_out(monkeypatch, 3):
        whole = {
            parameter: {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            for flat in (optimizer.matrices, optimizer.others)
            for parameter in flat.parameters
        }
        optimizer.take_states(whole)
        for parameter, elements, moments in (
            *optimizer.matrices.fragments(),
            *optimizer.others.fragments(),
        ):
            for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                assert torch.equal(moment.flatten(), whole[parameter][name].flatten()[elements])


def test_the_working_weights_are_the_masters_rounded(no_kernels):
    model = models.build(tiny_llama_v4)
    optimizer = MasterAdamW(model, lr=1e-2)
    optimizer.plan_memory(torch.bfloat16)
    fill(model)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(model.plan.buffers.working[parameter], parameter.bfloat16()), name
        inner = name.startswith("layers.") and parameter.dim() == 2
        assert model.plan.buffers.gradient[parameter].dtype == (
            torch.bfloat16 if inner else torch.float32
        ), name
