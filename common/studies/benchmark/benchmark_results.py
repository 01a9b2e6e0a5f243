"""The numbers that follow from what a benchmark measured, and their tables.

A time or a peak of a cell is the median over its repeats. Ratios are against the baseline, which is the first version by its
folder, or against the first model where the baseline was not measured. Above 1 a model is faster, or needs less memory. A
speed-up is the median of those in each repeat, against the same repeat of the other model: a load that comes and goes changes
both. Its range is that of the repeats.
"""

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any

from common.analysis.output import tables
from common.analysis.output.tables import Table
from common.records.study_files import Benchmark
from common.studies import known_models


def place(entry: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, B 8, S 128"."""
    return f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}"


COLUMNS = ("model", "batch_size", "sequence_length", "status", "ms", "p20", "p80", "repeats", "tokens_per_second", "speedup",
           "peak_mib", "memory_ratio")  # fmt: skip


def reference(measured: Benchmark) -> str:
    """The model that ratios are against."""
    baseline = next(iter(known_models.version_scripts()))
    return baseline if baseline in measured["models"] else measured["models"][0]


Row = dict[str, Any]  # by the names in COLUMNS, `times` and `speedups`


def results(measured: Benchmark) -> dict[tuple[str, int, int], Row]:
    """COLUMNS (None if not measured), and ms and speed-up of each repeat (`times`, `speedups`), by model, batch size, length."""
    found: dict[tuple[str, int, int], Row] = {}
    against = reference(measured)
    for cell in measured["cells"]:
        row: Row = dict.fromkeys(COLUMNS) | {name: value for name, value in cell.items() if name in COLUMNS}
        if cell["status"] == "ok":
            ms, p20, p80 = (median(run["step_ms"][name] for run in cell["runs"]) for name in ("median", "p20", "p80"))
            rate, peak = row["batch_size"] * row["sequence_length"] / ms * 1e3, median(run["peak_mib"] for run in cell["runs"])
            row |= {"ms": ms, "p20": p20, "p80": p80, "repeats": len(cell["runs"]), "tokens_per_second": rate, "peak_mib": peak}
            row["times"] = [run["step_ms"]["median"] for run in cell["runs"]]
        found[row["model"], row["batch_size"], row["sequence_length"]] = row
    for (_, size, length), row in found.items():
        base = found.get((against, size, length))
        if base and base["ms"] and row["ms"]:
            row["speedups"] = [theirs / ours for theirs, ours in zip(base["times"], row["times"], strict=False)]
            row |= {"speedup": median(row["speedups"]), "memory_ratio": base["peak_mib"] / row["peak_mib"]}
    return found


def ahead(measured: Benchmark, name: str) -> list[str]:
    """A phrase for each shape at which another model has a smaller median step time than `name`, or `name` has none.

    Models with products in FP8 are compared with each other only.
    """

    def in_fp8(model: str) -> bool:
        return model.endswith(known_models.FP8)

    found, phrases = {key: row for key, row in results(measured).items() if in_fp8(row["model"]) == in_fp8(name)}, []
    for ours in (cell for cell in found.values() if cell["model"] == name):
        shape = ours["batch_size"], ours["sequence_length"]
        measured_cells = (cell for key, cell in found.items() if key[1:] == shape and cell["ms"])
        fastest = min(measured_cells, key=itemgetter("ms"), default=ours)
        if not ours["ms"]:
            phrases.append(f"{place(ours)}: {ours['status']}")
        elif fastest["ms"] < ours["ms"]:
            theirs, own = tables.format_time(fastest["ms"]), tables.format_time(ours["ms"])
            phrases.append(f"{place(fastest)} takes {theirs}, {name} {own}")
    return phrases


def disagreements(measured: Benchmark) -> list[str]:
    """A sentence that names the neighbours in speed whose order is not the same in all repeats; nothing if there are none."""
    by_shape: dict[str, list[Row]] = {}
    for cell in sorted((cell for cell in results(measured).values() if cell["ms"]), key=itemgetter("ms")):
        by_shape.setdefault(f"B {cell['batch_size']}, S {cell['sequence_length']}", []).append(cell)
    found = []
    for shape, cells in by_shape.items():
        for faster, slower in pairwise(cells):
            if any(ours > theirs for ours, theirs in zip(faster["times"], slower["times"], strict=False)):
                found.append(f"{faster['model']} or {slower['model']} ({shape})")
    return [f"The repeats disagree on which is faster: {'; '.join(found)}."] if found else []


def _by_shape(measured: Benchmark, value: str, ratio: str) -> Table:
    """A row for each shape, a column for each model: the value, and its ratio against the reference."""
    found, against, rows = results(measured), reference(measured), []

    def shown(cell: Row) -> str:
        beside = f" ({cell[ratio]:.2f}x)" if cell[ratio] and cell["model"] != against else ""
        return f"{cell[value]:,.0f}{beside}" if cell[value] else cell["status"]

    for length in measured["sequence_lengths"]:
        for size in measured["batch_sizes"]:
            rows.append([size, length, *(shown(found[model, size, length]) for model in measured["models"])])
    return ["B", "S", *measured["models"]], rows


throughput_table = partial(_by_shape, value="tokens_per_second", ratio="speedup")
memory_table = partial(_by_shape, value="peak_mib", ratio="memory_ratio")


def step_table(measured: Benchmark) -> Table:
    """A row for each measured cell: the time of a step, and the range of its speed-up."""
    against, rows = reference(measured), []
    found = {key: cell for key, cell in results(measured).items() if cell["ms"]}
    unit, factor = tables.time_unit(max((cell["ms"] for cell in found.values()), default=1))
    for (model, size, length), cell in found.items():
        speedup = [None, ""]
        if cell["speedup"] and model != against:
            ratios = cell["speedups"]
            speedup = [cell["speedup"], f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else ""]
        rows.append([model, size, length, factor * cell["ms"], tables.spread(cell, factor), *speedup])
    return ["model", "B", "S", f"{unit}/step", "p20 to p80", "speed-up", "over the repeats"], rows


def scaling_table(measured: Benchmark) -> Table:
    """The growth of time, throughput and memory from the smallest to the largest batch size, and sequence length."""
    found, rows = results(measured), []
    sizes, lengths = measured["batch_sizes"], measured["sequence_lengths"]
    (least, most), (short, long) = (sizes[0], sizes[-1]), (lengths[0], lengths[-1])
    paths = [(f"B {least} to {most}", f"S {s}", (least, s), (most, s)) for s in lengths if least < most]
    paths += [(f"S {short} to {long}", f"B {b}", (b, short), (b, long)) for b in sizes if short < long]
    for model in measured["models"]:
        for growing, fixed, small, large in paths:
            before, after = found[model, small[0], small[1]], found[model, large[0], large[1]]
            if before["ms"] and after["ms"]:
                growth = [after[name] / before[name] for name in ("ms", "tokens_per_second", "peak_mib")]
                rows.append([model, growing, fixed, math.prod(large) / math.prod(small), *growth])
    return ["model", "growing", "at", "tokens x", "time x", "tokens/s x", "peak memory x"], rows


def accuracy_table(measured: Benchmark) -> Table:
    """The loss, its difference to the reference's, and the errors against float64."""
    good = {entry["model"]: entry for entry in measured["accuracy"] if entry["status"] == "ok"}
    against, rows = reference(measured), []
    for model, entry in good.items():
        difference = f"{entry['loss'] - good[against]['loss']:+.1e}" if against in good else ""
        values = [entry["logits_error"], entry["gradient_error"], entry["gradient"]]
        rows.append([model, f"{entry['loss']:.5f}", difference, *values])
    return ["model", "loss", f"minus {against}'s", "error of the logits", "largest of a gradient", "which is of"], rows
