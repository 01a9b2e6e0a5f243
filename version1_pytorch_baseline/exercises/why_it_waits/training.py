"""A small training program in which one part may have a fault.

python training.py                                      # all parts are mended
python training.py --fault checksum                     # that part is the one in starter/
python training.py --fault checksum --trace case.json   # also profiles two steps
python training.py --record ../../../results/h100/why_it_waits   # all faults; needs a GPU
"""

import argparse
import itertools
import runpy
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

from common import cli
from common import device as devices
from common.timing import benchmark
from common.training import record
from tracepage.errors import UsageError
from tracepage.files import write_measurement

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parent
# The part of each fault and what the GPU waits for, in the order of the recorded cases.
FAULTS = {
    "memory": ("tidy_memory", "allocation"),
    "checksum": ("checksum", "host"),
    "letters": ("Samples", "input"),
    "weights": ("save", "saving"),
    "norms": ("gradient_norms", "synchronization"),
    "features": ("host_tensor", "copy_to_device"),
}
TEXT = "the quick brown fox jumps over the lazy dog. "


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        up = nn.Linear(width, 4 * width)
        super().__init__(nn.LayerNorm(width), up, nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        return x + super().forward(x)


class Model(nn.Module):
    """Guesses the next letter from the last one and from features."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 128)

    def forward(self, letters: Tensor, features: Tensor) -> Tensor:
        x = self.blocks(self.letters(letters) + features)  # [B, S, D]
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits.float(), letters[:, 1:].flatten())


def train(fault: str | None, trace: Path | None = None) -> float:
    """The mean time of 12 steps in ms, after three; then profiles two, if asked."""
    parts = runpy.run_path(str(FOLDER / "solution/parts.py"))
    if fault:
        name = FAULTS[fault][0]
        parts[name] = runpy.run_path(str(FOLDER / "starter/parts.py"))[name]
    device = devices.select("auto")
    on_gpu = devices.is_gpu(device)
    width, blocks, batch_size, length = (1024, 12, 64, 256) if on_gpu else (16, 1, 32, 64)
    devices.configure(device, seed=0)
    samples = parts["Samples"](TEXT * batch_size * length, length)
    batches = iter(torch.utils.data.DataLoader(samples, batch_size, drop_last=True))
    model = Model(width, blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    features = parts["host_tensor"](batch_size, length, width)
    numbers = itertools.count()
    folder = tempfile.TemporaryDirectory()

    def step() -> None:
        batch = next(batches)
        parts["checksum"](batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            letters = batch.to(device, non_blocking=True)
            loss = model(letters, features.to(device, non_blocking=True))
        loss.backward()
        parts["gradient_norms"]([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        parts["tidy_memory"]()
        parts["save"](model, next(numbers), Path(folder.name, "weights.pt"))

    times = benchmark(step, device, warmup=3, iterations=12)
    if trace:
        # Nothing waits for the GPU between two profiled steps.
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
        with torch.profiler.profile(schedule=schedule, acc_events=True) as profile:
            for _ in range(3):
                step()
                profile.step()
        profile.export_chrome_trace(str(trace))
    folder.cleanup()
    return mean(times)


def record_all(folder: Path) -> None:
    """Writes a trace of each fault, and the times with and without it, measured in turns."""
    device = devices.select("auto")
    if not devices.is_gpu(device):
        raise UsageError("--record: the faults are recorded on a GPU, and there is none here")
    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for number, (fault, (_, cause)) in enumerate(FAULTS.items(), 1):
        times, without = zip(*((train(fault), train(None)) for _ in range(3)), strict=True)
        train(fault, folder / f"case_{number}.json.gz")
        case = {"case": number, "fault": fault, "cause": cause, "ms": median(times)}
        case |= {"ms_without": median(without), "all_ms": times, "all_ms_without": without}
        cases.append(case)
    measured = record.header("tiny-llama-why-it-waits/1", device, "bf16") | {"cases": cases}
    write_measurement(folder / "why_it_waits.json", measured, "--record")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=sorted(FAULTS), help="its part is that of starter/")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="profiles two more steps")
    parser.add_argument("--record", type=Path, metavar="DIR", help="records all faults, on a GPU")
    arguments = cli.parse(parser)
    if arguments.record:
        record_all(arguments.record)
    else:
        print(f"{train(arguments.fault, arguments.trace):.1f} ms a step")


if __name__ == "__main__":
    cli.command(main)
