"""What several processes compute, beside what one computes with all their sequences; torchrun
starts it, rank 0 writes JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.parallel_job RESULT.json
"""

import functools
import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType

from common import cli, data, ranks
from common.precision import Precision
from common.training import checkpoint, distributed, preparation
from tests import models
from version1_pytorch_baseline import tiny_llama_v1
from version2_pytorch_fused import tiny_llama_v2
from version3_triton import tiny_llama_v3
from version4_ultra_fused import tiny_llama_v4

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CPU, STEPS, B, S = torch.device("cpu"), 50, 2, 16
ALONE = ranks.Ranks()
TEXT = data.Dataset("", np.random.default_rng(0).integers(0, 61, 5000).astype(np.uint32), "")


class Collectives(TorchDispatchMode):
    """Counts collectives by name. CommDebugMode does so as well, but its hooks of modules work once
    in a process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator.namespace == "c10d":
            self.calls[operator.overloadpacket.__name__.strip("_")] += 1
        return operator(*arguments, **(keywords or {}))


def untied(version: ModuleType) -> Namespace:
    """The version with a weight of its own in the head."""

    def make_model(options: Namespace) -> nn.Module:
        model = version.make_model(options)
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) / 10)
        return model

    return Namespace(
        make_model=make_model, make_optimizer=version.make_optimizer, make_step=version.make_step
    )


def trained(
    version,
    form: str | None,
    amp: torch.dtype | None,
    here: ranks.Ranks = ALONE,
    kind: str = "none",
) -> dict:
    """Gradients of the first batch, losses of all, and the collectives of the last step."""
    torch.manual_seed(0)
    count = STEPS if version in (tiny_llama_v1, UNTIED) and amp is None else 10
    size = B * ranks.here().world_size // here.world_size
    batches = data.Batches(TEXT, (size, S, count), 0, CPU, here)
    switches = getattr(version, "SWITCHES", {})
    options = Namespace(
        model=models.config(),
        device="cpu",
        learning_rate=1e-2,
        capture_step=False,
        switches=switches,
        use_amp=False,
        checkpoint_activations=kind,
    )
    precision = Precision(CPU, amp)
    model = preparation.move_model(version.make_model(options), CPU, kind)
    if form:
        model = distributed.parallel_model(model, form, precision.dtype)
    optimizer = version.make_optimizer(model, options)
    if form:
        optimizer = distributed.parallel_optimizer(optimizer, form)
    prepared = preparation.Prepared(
        model, optimizer, version.make_step(model, optimizer, precision)
    )
    preparation.warm_up(prepared, precision, batches[0], passes=2, form=form)
    with preparation.without_update(prepared.optimizer, precision):
        preparation.repeat(prepared.step, prepared.optimizer, batches[0], 1)
        held = checkpoint.whole_states(prepared.optimizer)
        named = {
            name: held[parameter]["exp_avg"]
            for name, parameter in prepared.model.named_parameters()
            if parameter in held
        }
        gradients = {
            name: 10 * (moment.full_tensor() if form == "fsdp" else moment)
            for name, moment in named.items()
        }
    losses = [prepared.step(batches[i]).item() for i in range(count - 1)]
    with Collectives() as counted:
        losses.append(prepared.step(batches[count - 1]).item())
    return {"gradients": gradients, "losses": losses, "collectives": counted.calls}


@functools.cache
def alone(name: str, amp: torch.dtype | None) -> dict:
    return trained(VERSIONS[name], None, amp)


def compared(name: str, form: str, amp: torch.dtype | None = None, kind: str = "none") -> dict:
    """The largest errors of gradients and losses, which gradients this rank has compared, and the
    collectives of a step.
    """
    here, expected = ranks.here(), alone(name, amp)
    together = trained(VERSIONS[name], form, amp, here, kind)
    losses = ranks.mean(torch.tensor(together["losses"], dtype=torch.float64))
    pairs = [
        (gradient, expected["gradients"][key]) for key, gradient in together["gradients"].items()
    ]
    return {
        "gradient_error": max(
            ((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs
        ),
        "loss_error": (losses - torch.tensor(expected["losses"], dtype=torch.float64))
        .abs()
        .max()
        .item(),
        "fell_by": expected["losses"][0] - expected["losses"][-1],
        "compared": sorted(together["gradients"]),
        "parameters": sorted(expected["gradients"]),
        "collectives": together["collectives"],
    }


UNTIED = untied(tiny_llama_v1)
BF16_MOMENTS = Namespace(
    make_model=tiny_llama_v4.make_model,
    make_optimizer=tiny_llama_v4.make_optimizer,
    make_step=tiny_llama_v4.make_step,
    SWITCHES=tiny_llama_v4.SWITCHES | {"bf16-moments": True},
)
VERSIONS = {
    "v1": tiny_llama_v1,
    "untied": UNTIED,
    "v2": tiny_llama_v2,
    "v3": tiny_llama_v3,
    "v4": tiny_llama_v4,
    "v4-bf16-moments": BF16_MOMENTS,
}


def main() -> None:
    distributed.start(CPU, 600)
    cases = [(name, form) for name in ("v1", "untied") for form in ranks.FORMS]
    cases += [
        ("v2", "ddp", None, "block"),
        ("v2", "fsdp", None, "selective"),
        ("v2", "fsdp", None, "block"),
        ("v3", "zero1", None, "block"),
        ("v4", "ddp"),
        ("v4", "zero1"),
        ("v4-bf16-moments", "ddp"),
        ("v4-bf16-moments", "zero1"),
        *(("v1", form, torch.float16) for form in ("zero1", "fsdp")),
    ]
    results = {" ".join(map(str, case)): compared(*case) for case in cases}
    everyone = ranks.gathered(results)
    if ranks.here().main_process:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    cli.command(main)
