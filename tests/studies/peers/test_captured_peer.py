"""The hand-fused LLaMA's working copies, and its AdamW, which is PyTorch's. What it computes:
test_external_baselines.py.
"""

from argparse import Namespace

from studies import version_files
from studies.peers import captured_peer
from tests import study_options

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
CONFIG = study_options.PEER
OPTIONS = Namespace(model=CONFIG, batch_size=2, seq_len=9, seed=0, learning_rate=1e-2)
BATCH = version_files.random_batch(OPTIONS, CPU)


def built(dtype: torch.dtype) -> tuple[nn.Module, captured_peer.CompiledAdamW]:
    """A model and its optimizer, without torch.compile, with working copies in `dtype`."""
    torch.manual_seed(3)
    model = captured_peer.TinyLlama(CONFIG)
    return model, captured_peer.CompiledAdamW(model, dtype, OPTIONS.learning_rate, compiled=False)


def copies(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The weight and the working copy of each matrix that a product reads."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, captured_peer.Linear)
    }
    return {name: (module.weight, module.working) for name, module in found.items()}


def test_products_read_the_copies():
    model, _ = built(torch.bfloat16)
    assert len(copies(model)) == 4 * CONFIG.num_layers + 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model.loss(*BATCH)
        for weight, _ in copies(model).values():
            # the masters of the embedding and the norms are read
            if weight is not model.embed_tokens.weight:
                weight.mul_(2)
        assert model.loss(*BATCH) == before


def test_the_optimizer_is_adamw_on_the_masters():
    """Three steps with random gradients: of the copies in bf16, of the norms in fp32, and of the
    embedding in both.
    """
    model, optimizer = built(torch.bfloat16)
    masters = list(model.parameters())
    theirs = [nn.Parameter(master.detach().clone()) for master in masters]
    reference, generator = (
        torch.optim.AdamW(theirs, lr=OPTIONS.learning_rate),
        torch.Generator().manual_seed(0),
    )
    working = {weight: copy for weight, copy in copies(model).values()}
    for _ in range(3):
        for master, parameter in zip(masters, theirs, strict=True):
            leaves = [leaf for leaf in (working.get(master), master) if leaf is not None]
            if len(leaves) == 2 and master is not model.embed_tokens.weight:
                leaves.pop()
            for leaf in leaves:
                leaf.grad = torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
            parameter.grad = sum(leaf.grad.float() for leaf in leaves)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        assert all(leaf.grad is None for leaf in (*masters, *working.values()))
    for master, parameter in zip(masters, theirs, strict=True):
        torch.testing.assert_close(master, parameter, rtol=0, atol=1e-4 * OPTIONS.learning_rate)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[master][name], reference.state[parameter][name]
            )
    assert all(torch.equal(weight.bfloat16(), copy) for weight, copy in copies(model).values())
    assert optimizer.steps == 3


def test_loaded_weights_reach_the_copies():
    model, _ = built(torch.bfloat16)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    for weight, copy in copies(model).values():
        assert torch.equal(copy, weight.to(torch.bfloat16))
