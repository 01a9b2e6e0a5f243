"""Times training steps of one version in many combinations of its fusions, all in one process.

A version's fusions are switches, so what one of them brings can be seen with every setting of the others. Combinations are
timed in rounds, each a few steps of every combination, in turn forward and backward through the list: a slow spell of the
machine, or a clock that falls as it warms up, meets all of them. Every combination starts from the same weights and trains on the
same batch, so all must end at the same loss.

Peak memory (GPU only) is what the allocator holds at most in a combination's second and third step, less what it held before the
combination was built: idle combinations and the matrix library's workspace, which all share, are not in it. On a CPU the only
peak is that of the whole process, which says nothing about one of sixteen.

Kernels are counted in a trace of torch.profiler by `common.analysis.kernels`; on a CPU, operator calls that do work.

The result, fusion_ablation.json (schema "tiny-llama-ablation/1"):

    command, date, device, environment, model     as in a run record
    version          the version's name
    training         batch_size, sequence_length, seed
    precision        {"compute": "fp32"}
    rounds, steps_per_round
    left_out         why there are no combinations with torch_compile, or null
    counted          "kernels" or "operators": what launches_per_step counts; notes: what to know about that count
    combinations     a list of {"fusions": {name: on}, "flags": the version's flags for it,
                     "step_ms": {"median", "p20", "p80", "count"}, "round_ms": [median of each round],
                     "peak_mib": MiB or null, "launches_per_step", "loss": nats, "steps": steps trained until that loss}
"""

import gc
import itertools
import os
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from common import cli, record, versions
from common import device as devices
from common.analysis import kernels
from common.analysis.ablation import FUSIONS, SCHEMA
from common.errors import UsageError
from common.precision import Precision
from common.profiling import Profiler
from common.run import out_of_memory_explained
from common.timing import benchmark, summarize

STEPS = 5  # timed steps of a combination in a round
WARMUP = 3  # steps before the first round; the first of them compiles
PROFILED = dict(num_steps=5, profile_steps=2)  # the last two of five steps

Fusions = tuple[bool, ...]  # in the order of FUSIONS


@dataclass
class Case:
    """A combination: its model and optimizer, and what was measured of it."""

    fusions: Fusions
    flags: list[str]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    peak_mib: float | None = None
    rounds: list[list[float]] = field(default_factory=list)  # ms per step
    steps: int = 0
    loss: Tensor | None = None


def combinations(every: bool, with_compile: bool) -> list[Fusions]:
    """All settings of the fusions, or all off, each alone, all but each and all on; in the order of how many are on."""
    choices = [(False, True)] * (len(FUSIONS) - 1) + [(False, True) if with_compile else (False,)]
    most = len(FUSIONS) - (not with_compile)
    found = [c for c in itertools.product(*choices) if every or sum(c) in (0, 1, most - 1, most)]
    return sorted(found, key=lambda c: (sum(c), [not on for on in c]))


def flags_for(fusions: Fusions) -> list[str]:
    """The version's flags that set exactly these fusions."""
    return [f"--{'enable' if on else 'disable'}-{name.replace('_', '-')}" for name, on in zip(FUSIONS, fusions, strict=True)]


def measure(version: ModuleType, options: Namespace, every: bool, rounds: int) -> dict[str, Any]:
    """Measures the combinations, printing a line per round.

    Args:
        version: has a switch `--enable-X`, `--disable-X` for each of FUSIONS.
        options: from `versions.resolve`.
        every: all 16 combinations, not only none, one, all but one, and all.

    Returns:
        The content of fusion_ablation.json.

    Raises:
        UsageError: the version lacks a switch, or the environment overrides one.
        RunError: memory ran out.
    """
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1":
        raise UsageError("PYTORCH_FALLBACK_ATTENTION=1 keeps flash attention off in every combination: unset it")
    device = devices.select(options.device)
    devices.prepare(device, options.seed)
    precision = Precision(device, cli.amp_dtype(options))
    batch = versions.random_batch(options, device)
    left_out = devices.compile_problem(device)
    if left_out:
        print(f"left out: {left_out}", flush=True)
    else:
        torch._dynamo.config.recompile_limit = 64  # one function, compiled once for each combination
    wanted = combinations(every, not left_out)

    def train(case: Case) -> None:
        case.loss = version.train_step(case.model, case.optimizer, batch, precision)
        case.steps += 1

    with out_of_memory_explained(options):
        build(version, options, wanted[0], device, train)  # not kept: what is set up once for all must not count for the first
        cases = [build(version, options, fusions, device, train) for fusions in wanted]
        for i in range(rounds):
            start = time.perf_counter()
            for case in cases if i % 2 == 0 else reversed(cases):
                case.rounds.append(benchmark(lambda case=case: train(case), device, warmup=1, iterations=STEPS))
            print(f"round {i + 1} of {rounds}: {len(cases)} combinations in {time.perf_counter() - start:.1f} s", flush=True)
        losses = [(case.loss.item(), case.steps) for case in cases]
        counts = [count(case, train, device) for case in cases]
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": record.name(version),
        "device": devices.describe(device),
        "environment": devices.environment(),
        "model": options.model.model_dump(),
        "training": {"batch_size": options.batch_size, "sequence_length": options.seq_len, "seed": options.seed},
        "precision": {"compute": precision.name},
        "rounds": rounds,
        "steps_per_round": STEPS,
        "left_out": left_out,
        "counted": "operators" if counts[0].are_operators else "kernels",
        "notes": list(dict.fromkeys(note for counted in counts for note in counted.notes)),
        "combinations": [
            {
                "fusions": dict(zip(FUSIONS, case.fusions, strict=True)),
                "flags": case.flags,
                "step_ms": summarize([ms for times in case.rounds for ms in times]),
                "round_ms": [summarize(times)["median"] for times in case.rounds],
                "peak_mib": case.peak_mib,
                "launches_per_step": launches(counted),
                "loss": loss,
                "steps": steps,
            }
            for case, counted, (loss, steps) in zip(cases, counts, losses, strict=True)
        ],
    }


def build(version: ModuleType, options: Namespace, fusions: Fusions, device: torch.device, train: Any) -> Case:
    """A combination from the seed's weights, after its first steps, with its peak memory."""
    gc.collect()
    devices.synchronize(device)
    devices.reset_peak_memory(device)
    before = devices.peak_memory(device)["peak_mib"]  # after a reset: what is held now
    torch.manual_seed(options.seed)
    flags = flags_for(fusions)
    settings = versions.switched(version, options, *flags)
    model = version.make_model(settings).to(device)
    case = Case(fusions, flags, model, version.make_optimizer(model, settings))
    train(case)
    devices.synchronize(device)
    devices.reset_peak_memory(device)  # without what compiling needed
    for _ in range(WARMUP - 1):
        train(case)
    devices.synchronize(device)
    if devices.is_gpu(device):
        case.peak_mib = devices.peak_memory(device)["peak_mib"] - before
    return case


def count(case: Case, train: Any, device: torch.device) -> kernels.Kernels:
    """The kernels of two steps, from a trace in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(Namespace(profile_dir=Path(folder), profile_memory=False, **PROFILED), device)
        profiler.start()
        for step in range(PROFILED["num_steps"]):
            train(case)
            profiler.step(step + 1)
        profiler.stop()
        return kernels.load(profiler.trace_path)


def launches(counted: kernels.Kernels) -> float:
    """Kernels per step without copies and fills; on a CPU, operator calls that do work."""
    wanted = counted.table.category.isin(["kernel", "operator"])
    return float(counted.table.calls[wanted].sum()) / counted.steps
