"""How peak memory grows with the sequence length, from profiles that differ in nothing else.

A parabola over the sequence length S goes through the peaks of each version and kind of attention.
The exponent log(m2 / m1) / log(S2 / S1) between neighbouring lengths is that of the step's own
memory: the peak without weights and moments, which a GPU's allocator counts and a CPU's profile
does not.
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
from tracepage.views.batch_scaling import fit

MIB = 2**20
LEAST = 3  # lengths that a parabola needs
# The rotary tables' length follows S.
MAY_DIFFER = ("sequence length", "model max_sequence_length")
ABOUT_LENGTHS = (
    "Peak: bytes alive at once. Step: without weights and AdamW's moments. Exponent: of the step's "
    "memory, from the length before; 1 is linear, 2 quadratic."
)
ABOUT_FITS = (
    "Memory is fitted as a + b S + c S^2; the S^2 term overtakes the linear one at S = b / c. The "
    "peak is the largest of several moments of a step: where another one takes over as S grows, no "
    "parabola goes through all peaks, and the residual shows it."
)


class Peak(NamedTuple):
    """The peak of one profile, in bytes."""

    group: str  # version and kind of attention
    sequence_length: int
    peak: int
    step: int  # the step's own part of it
    path: Path
    record: TimedRun


def render_sequence_memory(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder: the peaks (and CSV), the fits and a JSON file.

    The JSON (schema "tiny-llama-sequence-memory/1") has the command and the fields of each `Peak`,
    its record without losses and step times; the tables can be made from it again.
    """
    peaks = read_lengths(folders)
    report = Report("Memory over the sequence length")
    record = peaks[0].record
    counter = "the GPU allocator"
    if record["device"]["kind"] == "cpu":
        counter = "the CPU allocator, from the start of the profile"
    report.text(f"{run_facts.describe(record, 'sequence_length')}. Counted by {counter}.")
    rows = []
    fits = []
    for group, members in grouped(peaks).items():
        for peak, exponent in zip(members, [None, *exponents(members)], strict=True):
            sizes = [peak.peak / MIB, peak.step / MIB]
            rows.append([group, peak.sequence_length, *sizes, exponent])
        curve = fit([(peak.sequence_length, peak.peak) for peak in members], 2)
        fixed, linear, quadratic = curve.factors
        distance = None if curve.residual is None else round(curve.residual) / MIB
        fits.append([group, round(fixed / MIB, 3), linear / 1024, quadratic, distance])
    report.table(["run", "S", "peak MiB", "step MiB", "exponent"], rows, csv="sequence_memory")
    report.text(ABOUT_LENGTHS)
    report.table(["run", "a MiB", "b KiB", "c bytes", "residual MiB"], fits)
    report.text(ABOUT_FITS)
    content: dict[str, Any] = {
        "schema": "tiny-llama-sequence-memory/1",
        "command": shlex.join(sys.argv),
        "runs": [],
    }
    for peak in peaks:
        conditions: dict[str, Any] = {**peak.record}
        del conditions["loss"], conditions["step_ms"]
        content["runs"].append({**peak._asdict(), "path": str(peak.path), "record": conditions})
    report.json("sequence_memory", content)
    return report


def read_lengths(folders: Sequence[Path]) -> list[Peak]:
    """The newest profile of each folder, by group and sequence length.

    UsageError: a group has fewer than LEAST lengths, or runs differ in something else.
    """
    peaks = []
    for folder in folders:
        path = step_profile.find(folder)
        peaks.append(_peak(path, step_profile.read(path)))
    for one, other in itertools.combinations(peaks, 2):
        same_version = one.record["version"] == other.record["version"]
        conditions = _conditions(one, same_version), _conditions(other, same_version)
        run_record.require_equal(
            (one.path, other.path), conditions, "sequence length and attention"
        )
    peaks.sort(key=lambda peak: (peak.group, peak.sequence_length))
    for group, members in grouped(peaks).items():
        lengths = {peak.sequence_length for peak in members}
        if len(lengths) < max(LEAST, len(members)):
            raise UsageError(
                f"{group}: give {LEAST} sequence lengths or more, with one profile for each"
            )
    return peaks


def _conditions(peak: Peak, same_version: bool) -> dict[str, Any]:
    """What must be equal; versions have switches of their own."""
    conditions = run_record.conditions(peak.record, *MAY_DIFFER)
    settings = peak.record["settings"] if same_version else {}
    return conditions | settings | {"flash_attention": None}


def _peak(path: Path, profile: step_profile.Profile) -> Peak:
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
    lasting = 0
    if profile["kernels"]:
        states = footprint.states(flops.sizes(record["model"]))
        lasting = states["weights"] + states["adamw"]
    group = record["version"]
    flash = record["settings"].get("flash_attention")
    if flash is not None:
        group += ", flash attention" if flash else ", plain attention"
    length = record["training"]["sequence_length"]
    return Peak(group, length, peak, peak - lasting, path, record)


def grouped(peaks: Sequence[Peak]) -> dict[str, list[Peak]]:
    """The peaks of each group, shortest first; they come as `read_lengths` orders them."""
    groups = itertools.groupby(peaks, key=lambda peak: peak.group)
    return {group: list(members) for group, members in groups}


def exponents(members: Sequence[Peak]) -> list[float]:
    """Local exponents between neighbouring lengths of one group."""
    return [
        math.log(longer.step / shorter.step)
        / math.log(longer.sequence_length / shorter.sequence_length)
        for shorter, longer in itertools.pairwise(members)
    ]
