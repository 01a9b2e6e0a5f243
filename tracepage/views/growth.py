"""How a training step grows with one size, from the profiles of runs that differ in nothing else.

`batch_scaling`: straight lines a + b B over the batch size B, by least squares, through the step
times and the peaks of memory. Of time, a is what every step costs (issuing operations, the
optimizer, Python), and throughput tends to S / b. Of memory, a is weights, gradients and optimizer
state, and b the activations of one sample.

`sequence_memory`: a parabola through the peaks over the sequence length S, of each version and kind
of attention. The exponent log(m2 / m1) / log(S2 / S1) between neighbouring lengths is that of the
step's own memory: the peak without weights and moments, which a GPU's allocator counts and a CPU's
profile does not.
"""

import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tracepage.cost import flops, footprint
from tracepage.errors import UsageError
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import TimedRun
from tracepage.show import run_facts
from tracepage.show.report import Report
from tracepage.show.tables import format_number

import numpy

MIB = 2**20
LEAST = 3  # lengths that a parabola needs
# the rotary tables' length follows S
MAY_DIFFER = ("sequence length", "model max_sequence_length", "flash_attention")
SIZE_COLUMNS = [
    "B",
    "ms/step",
    "p20",
    "p80",
    "tokens/s",
    "peak MiB",
    "TFLOP/s",
    "MFU %",
    "% of measured GEMM",
]
ABOUT_LENGTHS = (
    "Peak: bytes alive at once. Step: without weights and AdamW's moments. Exponent: of the step's memory, from the length "
    "before; 1 is linear, 2 quadratic."
)
ABOUT_FITS = (
    "Memory is fitted as a + b S + c S^2; the S^2 term overtakes the linear one at S = b / c. The peak is the largest of several "
    "moments of a step: where another one takes over as S grows, no parabola goes through all peaks, and the residual shows it."
)


class Curve(NamedTuple):
    """A polynomial: factors of x^0, x^1, ..., and the largest distance of a point from it (None if
    it goes through all).
    """

    factors: tuple[float, ...]
    residual: float | None


def fit(points: Sequence[tuple[float, float]], degree: int) -> Curve:
    """The polynomial through points (x, y), by least squares; factors and distance to a millionth."""
    x, y = numpy.array(points, dtype=float).T
    factors = numpy.polyfit(x, y, degree)
    residual = (
        round(float(numpy.abs(y - numpy.polyval(factors, x)).max()), 6)
        if len(points) > degree + 1
        else None
    )
    return Curve(tuple(round(float(factor), 6) + 0.0 for factor in factors[::-1]), residual)


def batch_scaling(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder; the report has a table (and CSV) and what the
    fits say.
    """
    runs = read_sizes(folders)
    report = Report("Batch scaling")
    report.text(
        f"{runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}. Step times are medians."
    )
    cells: list[dict[str, Any]] = [
        run_facts.columns(run) | run["step_ms"] | {"B": run["training"]["batch_size"]}
        for run in runs
    ]
    report.table(
        SIZE_COLUMNS, [[row[name] for name in SIZE_COLUMNS] for row in cells], csv="batch_scaling"
    )
    time, memory = (
        fit([(row["B"], row[name]) for row in cells], 1) for name in ("ms/step", "peak MiB")
    )
    report.text(
        f"Step time: t(B) = {equation(time, 'ms')}.", f"Memory: m(B) = {equation(memory, 'MiB')}."
    )
    if (slope := time.factors[1]) > 0:
        tokens = runs[0]["training"]["sequence_length"] * run_record.processes(runs[0])
        report.text(
            f"Throughput tends to S / b = {tokens / slope * 1e3:,.0f} tokens/s on this line."
        )
    if time.residual is None or memory.residual is None:
        report.text(
            "A line fits any two points, so nothing shows whether it describes other batch sizes: add a third."
        )
    else:
        distances = f"{format_number(time.residual)} ms, {format_number(memory.residual)} MiB"
        report.text(f"Largest distance of a point from its line: {distances}.")
    report.text(*run_facts.doubts({f"B = {run['training']['batch_size']}": run for run in runs}))
    return report


def read_sizes(folders: Sequence[Path]) -> list[TimedRun]:
    """The run records of the newest profile in each of two folders or more, by batch size; they
    differ in nothing else.
    """
    found = [(path, step_profile.read(path)["run"]) for path in map(step_profile.find, folders)]
    for (path, run), (other_path, other) in itertools.combinations(found, 2):
        ours, theirs = (
            run_record.identity(each) | each.get("settings", {}) for each in (run, other)
        )
        run_record.require_equal((path, other_path), (ours, theirs), "the batch size")
    runs = sorted((run for _, run in found), key=lambda run: run["training"]["batch_size"])
    if len({run["training"]["batch_size"] for run in runs}) != max(2, len(runs)):
        raise UsageError(
            "--profile-dirs: give two folders or more, with one profile for each batch size"
        )
    return runs


def equation(line: Curve, unit: str) -> str:
    """A straight line over B, as text."""
    fixed, slope = line.factors
    return f"{format_number(fixed)} {unit} {'-' if slope < 0 else '+'} {format_number(abs(slope))} {unit} x B"


class Run(NamedTuple):
    """One profile. group: version and kind of attention; peak, step: bytes at the peak, and of them
    the step's own.
    """

    group: str
    sequence_length: int
    peak: int
    step: int
    path: Path
    record: TimedRun


def sequence_memory(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder; the report has the peaks (and CSV), the fits and
    a JSON file.

    The JSON (schema "tiny-llama-sequence-memory/1") has the command and the fields of each `Run`,
    its record without losses and step times; the tables can be made from it again.
    """
    runs = read_lengths(folders)
    report = Report("Memory over the sequence length")
    record = runs[0].record
    on_cpu = record["device"]["kind"] == "cpu"
    counted = "the CPU allocator, from the start of the profile" if on_cpu else "the GPU allocator"
    report.text(f"{run_facts.describe(record, 'sequence_length')}. Counted by {counted}.")
    peaks: list[list[object]] = []
    fits: list[list[object]] = []
    for group, members in grouped(runs).items():
        for run, exponent in zip(members, [None, *exponents(members)], strict=True):
            peaks.append([group, run.sequence_length, run.peak / MIB, run.step / MIB, exponent])
        (fixed, linear, quadratic), residual = fit(
            [(run.sequence_length, run.peak) for run in members], 2
        )
        distance = None if residual is None else round(residual) / MIB
        fits.append([group, round(fixed / MIB, 3), linear / 1024, quadratic, distance])
    report.table(["run", "S", "peak MiB", "step MiB", "exponent"], peaks, csv="sequence_memory")
    report.text(ABOUT_LENGTHS)
    report.table(["run", "a MiB", "b KiB", "c bytes", "residual MiB"], fits)
    report.text(ABOUT_FITS)
    measured = []
    for run in runs:
        kept = {
            name: value for name, value in run.record.items() if name not in ("loss", "step_ms")
        }
        measured.append(run._asdict() | {"path": str(run.path), "record": kept})
    report.json(
        "sequence_memory",
        {
            "schema": "tiny-llama-sequence-memory/1",
            "command": shlex.join(sys.argv),
            "runs": measured,
        },
    )
    return report


def read_lengths(folders: Sequence[Path]) -> list[Run]:
    """The newest profile of each folder, by group and sequence length: at least LEAST lengths a
    group, which differ in nothing else.
    """
    runs = [_run(path, step_profile.read(path)) for path in map(step_profile.find, folders)]
    for one, other in itertools.combinations(runs, 2):
        ours = one.record
        theirs = other.record
        alike = ours["version"] == theirs["version"]
        named = [
            run_record.conditions(each) | (each["settings"] if alike else {})
            for each in (ours, theirs)
        ]
        own, others = (
            {name: value for name, value in each.items() if name not in MAY_DIFFER}
            for each in named
        )
        run_record.require_equal(
            (one.path, other.path), (own, others), "sequence length and attention"
        )
    runs.sort(key=lambda run: (run.group, run.sequence_length))
    for group, members in grouped(runs).items():
        lengths = {run.sequence_length for run in members}
        if len(lengths) < max(LEAST, len(members)):
            raise UsageError(
                f"{group}: give {LEAST} sequence lengths or more, with one profile for each"
            )
    return runs


def _run(path: Path, profile: step_profile.Profile) -> Run:
    record = profile["run"]
    peak = profile["memory_peak_bytes"]
    if peak is None or "settings" not in record:
        raise UsageError(
            f"{path} was recorded without memory: profile again with --enable-memory-profiling"
        )
    if len(record["step_ms"]["all"]) <= profile["profiled_steps"]:
        raise UsageError(
            f"{path} has the first step, which allocates the moments: take --num-steps 3 or more"
        )
    states = footprint.states(flops.sizes(record["model"]))
    lasting = states["weights"] + states["adamw"] if profile["kernels"] else 0
    if peak <= lasting:
        raise UsageError(
            f"{path}: memory_peak_bytes: {peak} bytes are no more than weights and moments take ({lasting})"
        )
    flash = record["settings"].get("flash_attention")
    attention = "" if flash is None else ", flash attention" if flash else ", plain attention"
    return Run(
        f"{record['version']}{attention}",
        record["training"]["sequence_length"],
        peak,
        peak - lasting,
        path,
        record,
    )


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each group, shortest first; `runs` as `read_lengths` orders them."""
    return {
        group: list(members)
        for group, members in itertools.groupby(runs, key=lambda run: run.group)
    }


def exponents(members: Sequence[Run]) -> list[float]:
    """Local exponents between neighbouring lengths of one group."""
    return [
        math.log(longer.step / shorter.step)
        / math.log(longer.sequence_length / shorter.sequence_length)
        for shorter, longer in itertools.pairwise(members)
    ]
