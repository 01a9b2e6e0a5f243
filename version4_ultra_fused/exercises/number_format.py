"""The number format of products: what FP8 can gain by arithmetic, and what its scales do.

    python number_format.py --gpu "NVIDIA H200"
    python number_format.py --scale-error -6 0 6

The first command needs no GPU; it reads the data sheet's peaks. The second trains Version 4 with
its products in FP8 for 60 steps at a small size, also on a CPU, with every scale that follows from
earlier steps multiplied by 2 to the power K.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of this clone

from common import cli, data
from common import device as devices
from common.config import PRESETS, ModelConfig, resolve
from common.precision import Precision
from tracepage.cost import peaks
from tracepage.errors import UsageError
from tracepage.show import tables
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.memory.optimizer import MasterAdamW

import torch
from torch import Tensor

# The kernels of a layer that bf16 does not have: three of x, three of gradients, four of weights.
CASTS = 10
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
)
KERNEL_US = 2  # of the shortest kernel in a graph
STEPS = 60
BATCH = 4
LENGTH = 32


def layer(model: ModelConfig, tokens: int) -> tuple[int, int]:
    """FLOPs of a layer's products in a step, forward and backward, and the bytes of casts that no
    other kernel does.

    A cast of a number moves 4 bytes: it reads bfloat16, and writes FP8 by rows and transposed.
    """
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    d = model.hidden_size
    f = model.intermediate_size
    weights = heads * d + model.num_attention_heads * model.head_dim * d + 3 * d * f
    return 6 * tokens * weights, 4 * (tokens * (5 * d + heads) + weights)


def forecast(gpu: str) -> str:
    """A table with the time of a layer by arithmetic, one row a preset."""
    peak = peaks.datasheet(gpu) or {}
    if "fp8" not in peak or "bf16" not in peak:
        raise UsageError(f"--gpu {gpu}: no peak of FP8 is listed")
    rows = []
    for preset in PRESETS:
        config = resolve(preset)
        flops, moved = layer(
            config.model, config.training.batch_size * config.training.sequence_length
        )
        bf16 = 1e6 * flops / peak["bf16"]
        fp8 = 1e6 * flops / peak["fp8"]
        casts = 1e6 * moved / peak["bandwidth"]
        gain = bf16 - fp8 - casts
        launched = bf16 - fp8 - max(casts, CASTS * KERNEL_US)
        rows.append([preset, flops / 1e9, bf16, fp8, moved / 1e6, casts, gain, launched])
    limits = "gain, us", f"gain if a cast takes {KERNEL_US} us"
    return tables.text(
        ["a layer of", "GFLOP", "bf16, us", "FP8, us", "casts, MB", "casts, us", *limits], rows
    )


def losses(scale_error: int, fp8: bool = True) -> list[float]:
    """The losses of STEPS steps, with every scale multiplied by 2 to the power `scale_error`."""
    device = devices.select("auto")
    devices.configure(device, seed=0)
    model = v4.TinyLlama(SMALL, v4.SWITCHES | {"fp8": fp8}).to(device)
    optimizer = MasterAdamW(model, lr=3e-3)
    if optimizer.scales:
        optimizer.scales.most /= 2.0**scale_error
    step = v4.make_step(model, optimizer, Precision(device, torch.bfloat16))
    batches = data.Batches(data.markov(SMALL.vocab_size, 0), (BATCH, LENGTH, STEPS), 0, device)
    tensors: list[Tensor] = [step(batches[i]) for i in range(STEPS)]
    return [loss.item() for loss in tensors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gpu",
        default="NVIDIA H200",
        metavar="NAME",
        help="of the data sheet (default: NVIDIA H200)",
    )
    parser.add_argument(
        "--scale-error",
        type=int,
        nargs="+",
        metavar="K",
        help="train with scales that are 2^K times right",
    )
    options = cli.parse(parser)
    if options.scale_error is None:
        print(forecast(options.gpu))
        return
    runs = {"bf16": losses(0, fp8=False)}
    for error in options.scale_error:
        runs[f"FP8, scales x 2^{error}"] = losses(error)
    rows = [[name, values[0], values[-1]] for name, values in runs.items()]
    print(tables.text(["products", "loss 1", f"loss {STEPS}"], rows))


if __name__ == "__main__":
    cli.command(main)
