"""Calls your functions with the values of a problem in README.md.

    python try_it.py time
    python try_it.py memory --implementation solution

It prints what they return; times are in microseconds.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from types import ModuleType

from common import cli
from common import device as devices

import toolkit
import torch
from run_lab import command, load


def time(profiling: ModuleType, device: torch.device) -> None:
    """Problem 1."""
    vectors = [torch.ones(n, device=device) for n in (1, 10**3, 10**5, 10**6)]
    seconds = [profiling.benchmark_function(torch.add, (x, 1), iterations=200) for x in vectors]
    print("us of x + 1:", [round(1e6 * second, 1) for second in seconds])
    if devices.is_gpu(device):
        x = torch.ones(8192, 8192, device=device)
        seconds = [profiling.benchmark_function(torch.mm, (x, x), sync=sync) for sync in (True, False)]
        print("us of x @ x, with sync=True and False:", [round(1e6 * second, 1) for second in seconds])


def memory(profiling: ModuleType, device: torch.device) -> None:
    """Problem 2; on a CPU, whose process is never empty, what the call adds."""
    x = torch.ones(8, 2**20, device=device)
    gpu = devices.is_gpu(device)
    for name, function in {"x + 1": lambda x: x + 1, "(x + 1).sum()": lambda x: (x + 1).sum()}.items():
        print(name, profiling.measure_memory_usage(function, (x,)) if gpu else toolkit.added_memory(function, (x,), "cpu"))


def intensity(profiling: ModuleType, device: torch.device) -> None:
    """Problem 5."""
    for name, shapes in ("matmul", [(1024, 1024)] * 2), ("matmul", [(1, 1024), (1024, 1024)]), ("softmax", (8, 128, 128)):
        print(name, shapes, profiling.compute_arithmetic_intensity(name, shapes))


PROBLEMS = {"time": time, "memory": memory, "intensity": intensity}


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--implementation", choices=toolkit.FOLDERS, default="starter", help="default: starter")
    cli.add(parser, "--device")
    options = parser.parse_args()
    PROBLEMS[options.problem](load(options.implementation), devices.select(options.device))


if __name__ == "__main__":
    command(main)
