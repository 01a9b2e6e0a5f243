"""Times training steps of one version in many combinations of its fusions, all in one process.

A version's fusions are switches, so the effect of one of them can be measured with every setting of
the others. Combinations are timed in rounds, each a few steps of every combination, in turn forward
and backward through the list: a slow spell of the machine, or a clock that falls as it warms up,
meets all of them. Every combination starts from the same weights and trains on the same batch, so
all must end at the same loss. With --capture-step every combination is captured as a graph.

Peak memory (GPU only) is what the allocator holds at most in a combination's second and third step,
less what it held before the combination was built. So idle combinations and the matrix library's
workspace, which all share, do not count. On a CPU only the peak of the whole process is known,
which says nothing about one of many combinations. Kernels are counted in a trace of
torch.profiler; on a CPU, operator calls that do work are counted.
"""

import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from common import cli
from common import device as devices
from common.options import Options
from common.precision import Precision, amp_dtype
from common.timing import benchmark, summarize
from common.training import profiler, record
from common.training.preparation import Batch
from common.training.run import explained
from common.training.study_step import prepare_for_study
from studies import version_files
from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.readers.source import Source
from tracepage.records.study_files import Ablation
from tracepage.terminal import progress
from tracepage.views.fusion_ablation import FUSIONS

import torch
from torch import Tensor

ENDED_EARLY = "the study ended before the losses were read and the launches were counted"
STEPS = 5  # timed steps of a combination in a round
WARMUP = 3  # steps before the first round; the first of them compiles

ADAMW = list(FUSIONS).index("fused_adamw")

Fusions = tuple[bool, ...]  # in the order of FUSIONS


def combinations(every: bool, with_compile: bool) -> list[Fusions]:
    """All settings of the model's fusions, and fused AdamW with none and with all of them; or all
    off, each alone, all but each and all on. They are in the order of how many are on.

    The optimizer is no part of the model, so its effect hardly depends on the other fusions.
    """
    most = len(FUSIONS)
    settings: Iterable[Fusions] = itertools.product((False, True), repeat=most)
    if not with_compile:
        settings = (fusions for fusions in settings if not fusions[-1])
        most -= 1
    if every:
        settings = (
            fusions for fusions in settings if not fusions[ADAMW] or sum(fusions) in (1, most)
        )
    else:
        settings = (fusions for fusions in settings if sum(fusions) in (0, 1, most - 1, most))
    return sorted(settings, key=lambda fusions: (sum(fusions), [not on for on in fusions]))


def flags_for(fusions: Fusions) -> list[str]:
    """The version's flags that set exactly these fusions."""
    return [
        f"--{'enable' if on else 'disable'}-{name.replace('_', '-')}"
        for name, on in zip(FUSIONS, fusions, strict=True)
    ]


def measure(version: ModuleType, options: Options, every: bool, rounds: int, path: Path) -> int:
    """Measures the combinations (`every`: all 18); after each round it writes fusion_ablation.json
    (`path`) and prints a line.

    The first signal within the rounds ends them after the current one; the result then holds fewer
    rounds. Returns the exit code: 0, or 128 + n if stopped by signal n. UsageError: the version
    lacks a switch, the environment overrides one, or the step cannot be captured here. RunError:
    memory ran out.
    """
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1":
        raise UsageError(
            "PYTORCH_FALLBACK_ATTENTION=1 keeps flash attention off in every combination: unset it"
        )
    device = devices.select(options.device)
    devices.configure(device, options.seed, deterministic=options.deterministic)
    precision = Precision(device, amp_dtype(options))
    batch = version_files.random_batch(options, device)
    left_out = devices.compile_problem(device)
    if left_out:
        print(f"left out: {left_out}", flush=True)
    else:
        # One function is compiled once for each combination.
        torch._dynamo.config.recompile_limit = 64
    settings = combinations(every, not left_out)
    turn: list[tuple[dict[str, Any], Callable[[], Tensor], list[float]]] = []
    with explained(options):
        with progress(f"building {len(settings)} combinations"):
            # The first is built twice: what is set up once for all must not count for it.
            build(version, options, settings[0], precision, batch)
            for fusions in settings:
                train, peak = build(version, options, fusions, precision, batch)
                row: dict[str, Any] = {
                    "fusions": dict(zip(FUSIONS, fusions, strict=True)),
                    "flags": flags_for(fusions),
                    "peak_mib": peak,
                    "round_ms": [],
                    "launches_per_step": None,
                    "loss": None,
                }
                turn.append((row, train, []))
        measured = record.header(
            files.schema_of(Ablation),
            device,
            precision.name,
            model=options.model,
            deterministic=options.deterministic,
        ) | {
            "version": record.name(version),
            "settings": {"capture_step": True} if options.capture_step else {},
            "training": {
                "batch_size": options.batch_size,
                "sequence_length": options.seq_len,
                "seed": options.seed,
            },
            "rounds": 0,
            "steps_per_round": STEPS,
            "left_out": left_out,
            "counted": "kernels" if devices.is_gpu(device) else "operators",
            "notes": [ENDED_EARLY],
            "combinations": [row for row, _, _ in turn],
        }
        with cli.signals_deferred() as received:
            while measured["rounds"] < rounds and not received:
                start = time.perf_counter()
                measured["rounds"] += 1
                for row, train, all_ms in turn:
                    ms = benchmark(train, device, warmup=1, iterations=STEPS)
                    all_ms += ms
                    row["round_ms"].append(summarize(ms)["median"])
                    row["step_ms"] = summarize(all_ms)
                    row["steps"] = WARMUP + measured["rounds"] * (1 + STEPS)
                turn.reverse()
                files.write_measurement(path, measured, "--output-dir")
                seconds = time.perf_counter() - start
                print(
                    f"round {measured['rounds']} of {rounds}: {len(turn)} combinations in "
                    f"{seconds:.1f} s",
                    flush=True,
                )
        notes: list[str] = []
        with progress("counting the launches of each combination"):
            for row, train, _ in turn:
                row["loss"] = train().item()
                row["steps"] += 1
                counted = count(train)
                row["launches_per_step"] = launches_per_step(counted)
                notes += counted.notes
    measured["notes"] = list(dict.fromkeys(notes))
    files.write_measurement(path, measured, "--output-dir")
    return 128 + received[0] if received else 0


def build(
    version: ModuleType, options: Options, fusions: Fusions, precision: Precision, batch: Batch
) -> tuple[Callable[[], Tensor], float | None]:
    """A combination's training step, which returns the loss, after its first steps from the seed's
    weights; its peak in MiB.
    """
    device = precision.device
    gc.collect()
    devices.synchronize(device)
    devices.reset_peak_memory(device)
    before = devices.peak_memory(device)["peak_mib"]  # after a reset: what is held now
    torch.manual_seed(options.seed)
    settings = version_files.switched(version, options, *flags_for(fusions))
    prepared = prepare_for_study(version, settings, precision, batch)

    def train() -> Tensor:
        # This also keeps the model: a captured step holds none of the weights that it reads.
        return prepared.step(batch)

    train()
    devices.synchronize(device)
    devices.reset_peak_memory(device)  # without what compiling needed
    for _ in range(WARMUP - 1):
        train()
    devices.synchronize(device)
    peak = devices.peak_memory(device, prepared.graph_peak_bytes)["peak_mib"] - before
    return train, peak if devices.is_gpu(device) else None


def count(train: Callable[[], object]) -> Source:
    """The kernels of two steps, from a trace in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.trace(train, path, active=2)
        return load_kernels.load(path)


def launches_per_step(counted: Source) -> float:
    """Kernels per step without copies and fills; on a CPU, operator calls that do work."""
    assert counted.steps, "a trace of ours marks its steps"
    table = counted.table
    return float(table.calls[table.category.isin(["kernel", "operator"])].sum()) / counted.steps
