"""Trains Version 2's model under DeepSpeed, which shards its state over the processes (ZeRO stages 1 to 3).

Model, optimizer, data and seed are those of tiny_llama_v2.py. A comment marks each line that is there for DeepSpeed.

    deepspeed --num_gpus 2 train.py --deepspeed ds_config_zero1.json             # one process a GPU; without GPUs, on the CPU
    torchrun --standalone --nproc-per-node 2 train.py --deepspeed ds_config_zero1.json        # the same, started by PyTorch
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import argparse
from collections.abc import Iterable
from typing import Literal

from common import cli, config, data, files, ranks
from common import device as devices
from common.errors import UsageError
from common.training import distributed
from version2_pytorch_fused import tiny_llama_v2

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from typing_extensions import NotRequired, TypedDict


class Zero(TypedDict):
    stage: Literal[1, 2, 3]


class Settings(TypedDict):
    """What this script needs of DeepSpeed's configuration."""

    zero_optimization: Zero
    train_micro_batch_size_per_gpu: NotRequired[PositiveInt]


def parser() -> cli.Parser:
    result = cli.Parser(__doc__)
    result.add_argument("--deepspeed", type=Path, required=True, metavar="FILE.json", help="DeepSpeed's configuration")
    result.add_argument("--preset", choices=config.PRESETS, default="tiny", help="size of the model (default: tiny)")
    result.add_argument("--batch-size", type=cli.positive, metavar="B", help="sequences of a process (default: as in FILE.json)")
    result.add_argument("--seq-len", type=cli.positive, default=128, metavar="S", help="tokens in a sequence (default: 128)")
    result.add_argument("--num-steps", type=cli.positive, default=10, metavar="N", help="training steps (default: 10)")
    result.add_argument("--data", default="stdlib", metavar="NAME", help="stdlib, synthetic or a text file (default: stdlib)")
    result.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed: its launcher adds this flag
    return result


def train(options: argparse.Namespace) -> None:
    if not ranks.here().launched:
        raise UsageError("this script trains on several processes: start it with deepspeed or torchrun")
    settings = files.check(options.deepspeed, files.read_json(options.deepspeed), Settings)
    if options.batch_size:
        settings["train_micro_batch_size_per_gpu"] = options.batch_size
    chosen = config.resolve(options.preset, training=dict(sequence_length=options.seq_len, num_steps=options.num_steps))
    here, training = ranks.here(), chosen.training
    device = devices.select("cuda" if torch.cuda.is_available() else "cpu")
    if devices.is_gpu(device):
        devices.take_gpu(here.local_rank, "--num_gpus")
    devices.prepare(device, training.seed)
    dataset = data.load(options.data, chosen.model.vocab_size, training.seed)
    model = tiny_llama_v2.TinyLlama(chosen.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)

    # DeepSpeed: it shards model and optimizer, and stage 3 gathers weights when a module's `forward` is called, not its `loss`.
    engine = initialize(distributed.Loss(model), optimizer, settings)
    batch_size = engine.train_micro_batch_size_per_gpu()  # DeepSpeed: from its settings
    shape = batch_size, training.sequence_length, training.num_steps
    batches = data.Batches(dataset, *shape, training.seed, engine.device, here.rank, here.world_size)
    for i in range(training.num_steps):
        loss = engine(*batches[i])  # DeepSpeed: in place of model.loss(*batches[i])
        engine.backward(loss)  # DeepSpeed: in place of loss.backward()
        engine.step()  # DeepSpeed: in place of optimizer.step() and optimizer.zero_grad()
        mean = distributed.mean(loss.detach().clone()).item()
        if here.main_process:
            print(f"step {i + 1:5d}/{training.num_steps}  loss {mean:7.4f}", flush=True)
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]  # DeepSpeed: stage 3 keeps a part
    state = [tensor for values in engine.optimizer.optimizer.state.values() for tensor in values.values()]
    if here.main_process:
        print(
            f"ZeRO stage {engine.zero_optimization_stage()}, {here.world_size} processes: between two steps a process holds "
            f"{mib(weights):.2f} MiB of the model's weights and {mib(state):.2f} MiB of AdamW's moments"
        )
    distributed.end()


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings):
    """DeepSpeed's engine around the model."""
    import deepspeed

    if not torch.cuda.is_available():  # on a CPU DeepSpeed would first compile collectives of its own, for minutes
        deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def mib(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


def main() -> None:
    options = parser().parse_args()
    cli.require("deepspeed")
    train(options)


if __name__ == "__main__":
    cli.command(main)
