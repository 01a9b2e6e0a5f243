"""Calls your checks on a simulated GPU or a real one, or your p_value on a benchmark's processes.

    python measure.py
    python measure.py --gpu measuring.json
    python measure.py --processes benchmark.json

KERNEL_EXERCISES=solution takes solution/checks.py in place of starter/checks.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import functools
import time
from collections.abc import Callable
from statistics import mean
from types import ModuleType

import exercise_tools as exercises
from common import cli, nvml
from common import device as devices
from common.training import record
from tracepage import files
from tracepage.errors import UsageError
from tracepage.records import study_files
from tracepage.show import tables

import torch
from harnesses import BUFFERS, LIARS, Device, SimulatedGPU


class RealGPU:
    """A buffer has 16 MiB, so the L2 cache of a large GPU holds one, and not all."""

    def __init__(self) -> None:
        self.x, self.weight = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.buffers = torch.ones(len(BUFFERS), 2**22, device="cuda")
        self.launches = 0
        self.captured = functools.cache(self._captured)
        self.now = time.perf_counter
        self.synchronize = torch.cuda.synchronize

    def _captured(self, *buffers: int):
        return devices.capture_graph(lambda: [self.buffers[i].mul_(1) for i in buffers])

    def update(self, buffers) -> None:
        self.launches += 1
        self.captured(*buffers)()

    def product(self) -> torch.Tensor:
        self.launches += 1
        return (self.x @ self.weight)[0, 0]


def counter_ms() -> float:
    """Mean time between two updates of the counter of energy, over two seconds."""
    values = {nvml.joules()}
    moments = []
    end = time.perf_counter() + 2
    while time.perf_counter() < end:
        joules = nvml.joules()
        if joules not in values:
            values.add(joules)
            moments.append(time.perf_counter())
    return 1e3 * (moments[-1] - moments[0]) / (len(moments) - 1)


def show_checks(mine: ModuleType, make_device: Callable[[], Device]) -> list[dict]:
    rows = []
    for name, (liar, holds) in LIARS.items():
        # A real GPU needs new processes for this check, which a benchmark starts.
        if name == "repeats" and make_device is RealGPU:
            continue
        check = getattr(mine, name)
        row = {"check": name, "harness": liar.__name__}
        row["of the liar"] = check(liar, make_device())
        row["of honest"] = check(holds, make_device())
        rows.append(row)
    print(tables.text(list(rows[0]), [list(row.values()) for row in rows]))
    return rows


def show_processes(mine: ModuleType, path: Path) -> None:
    study = study_files.read_benchmark(path)
    processes = [len(cell["runs"]) for cell in study["cells"][:2]]
    if len(study["models"]) < 2 or min(processes, default=0) < 2:
        raise UsageError(f"{path}: give a benchmark of two models, with two processes or more each")
    one, other = study["cells"][:2]
    a = [run["step_ms"]["median"] for run in one["runs"]]
    b = [run["step_ms"]["median"] for run in other["runs"]]
    both = f"{one['model']} and {other['model']}"
    groups = {}
    for n in range(2, len(a) + 1):
        groups[f"{both}, {n} and {len(b[:n])} processes"] = a[:n], b[:n]
    half = len(a) // 2
    groups[f"{one['model']}, first half and second half"] = a[:half], a[half:]
    rows = []
    for name, (first, second) in groups.items():
        change = 100 * (mean(second) / mean(first) - 1)
        rows.append([name, change, mine.p_value(first, second)])
    print(tables.text(["compared", "second - first, %", "p"], rows))


@exercises.unsolved()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--processes", type=Path, metavar="benchmark.json", help="compares its first two models"
    )
    parser.add_argument(
        "--gpu", type=Path, metavar="FILE", help="runs the harnesses on the GPU here, writes this"
    )
    options = cli.parse(parser)
    mine = exercises.load(Path(__file__).parent, "checks")
    if options.processes:
        show_processes(mine, options.processes)
    elif options.gpu:
        files.writable_file(options.gpu, "--gpu")
        measured = record.header("tiny-llama-measuring/1", devices.select("cuda"))
        measured["counter_ms"] = counter_ms()
        measured["checks"] = show_checks(mine, RealGPU)
        files.write_measurement(options.gpu, measured, "--gpu")
    else:
        show_checks(mine, SimulatedGPU)


if __name__ == "__main__":
    cli.command(main)
