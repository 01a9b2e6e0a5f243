"""Tables and reports of the files that run_lab.py of the profiling lab writes.

PARTS describes each part of the file once. TABLES makes the tables of documents from results/<device>/profiling_lab.json.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.analysis.output.tables import Table
from common.analysis.reports import roofline
from common.errors import UsageError
from common.files import read
from common.records.fields import Ceilings
from common.records.lab_file import Components, Fix, Lab, Layer, PartName, Way

import pandas

FILE = "profiling_lab.json"
NAMES = {"pytorch": "PyTorch", "jax": "JAX"}
COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILION)


def components(results: Components) -> Table:
    """Each component of attention: time, share of the total, memory, work, bound."""
    rows = []
    for framework, found in results.items():
        total = sum(result["time_ms"] for result in found or [])
        for result in found or []:
            work = [result["flops"] / 1e9, result["bytes_moved"] / 1e6, result["flops"] / result["bytes_moved"]]
            share, memory = 100 * result["time_ms"] / total, result["memory_mb"] or None  # 0: not measured
            rows.append([NAMES[framework], result["name"], result["time_ms"], share, memory, *work, result["bound"]])
    return ["framework", "component", "ms", "% of total", "MiB added", "GFLOP", "MB moved", "FLOP/byte", "bound"], rows


def over_lengths(unit: str, *names: str) -> Callable[[list[dict[str, Any]]], Table]:
    """The rows of a table over the sequence length S, with a column for each name."""
    header = ["S", *(f"{name} {unit}" for name in names)]
    return lambda results: (header, [[row["seq_len"], *map(row.get("ms", row).get, names)] for row in results])


def bottlenecks(results: list[Way]) -> Table:
    """Each bottleneck: the mistake, then the same work done better."""
    first = {row["bottleneck"]: row["ms"] for row in reversed(results)}
    rows = [
        [row["bottleneck"].replace("_", " "), row["way"], row["ms"], f"{first[row['bottleneck']] / row['ms']:.2f}x"]
        for row in results
    ]
    return ["bottleneck", "way", "ms", "against the first"], rows


def fixes(results: list[Fix]) -> Table:
    """A training step of Version 1 with each fix."""
    rows, plain = [], results[0]["step_ms"]["median"]
    for row in results:
        step, peak = row["step_ms"], f"{tables.format_number(row['peak_mib'])} ({row['kind']})"
        ratio = f"{plain / step['median']:.2f}x"
        rows.append([row["fix"], step["median"], tables.spread(step), ratio, peak, f"{row['loss']:.4f}"])
    return ["fix", "ms/step", "p20 to p80", "against none", "peak MiB", "loss"], rows


def layer(results: Layer) -> Table:
    """The time of one layer, forward and backward, by span."""
    whole = results["profiled_ms"]
    rows: list[list[Any]] = []
    for span, phases in results["spans"].items():
        rows.append([span, phases.get("forward", 0.0), phases.get("backward", 0.0), 100 * sum(phases.values()) / whole])
    rest = 100 - sum(row[-1] for row in rows)
    rows.append(["idle GPU" if results["on_gpu"] else "outside operators (Python)", None, None, rest])
    return ["span", "forward ms", "backward ms", "% of the profiled pass"], rows


def component_figure(rows: Table) -> "plots.Figure":
    """Horizontal bars, in one colour for each framework."""
    frame = pandas.DataFrame(rows[1], columns=rows[0])
    times = frame.pivot(index="component", columns="framework", values="ms")
    times = times.loc[frame.component.unique(), frame.framework.unique()]  # in the order of the rows
    result = plots.new(5, 1 + 0.45 * len(times))
    axes = times.plot.barh(ax=result.subplots(), color=list(COLOURS), width=0.8, legend=False)
    axes.set(xlabel="ms", ylabel="")
    axes.invert_yaxis()
    result.legend(loc="outside upper center", ncols=2)
    return result


def line_figure(rows: Table) -> "plots.Figure":
    """A line for each column of `over_lengths`, on logarithmic axes; columns without values are left out."""
    header, body = rows
    unit = header[-1].split()[-1]
    frame = pandas.DataFrame(body, columns=header).set_index("S").astype(float)
    frame = frame.where(frame > 0).dropna(axis="columns", how="all").rename(columns=lambda name: name.removesuffix(f" {unit}"))
    result = plots.new(5, 3.4)
    axes = frame.plot(ax=result.subplots(), loglog=True, marker="o", color=list(COLOURS), legend=False)
    axes.set(xlabel="sequence length S", ylabel=unit)
    axes.set_xticks(list(frame.index), list(map(str, frame.index)))
    axes.xaxis.minorticks_off()
    axes.grid(True, which="both", color="0.9")
    result.legend(loc="outside upper center", ncols=2)
    return result


class Part(NamedTuple):
    """A part of the file: its section in the page, and its table."""

    title: str
    text: str  # with the fields that `analyze` fills in
    rows: Callable[[Any], Table]
    draw: Callable[[Table], "plots.Figure"] | None = None
    description: str = ""  # of the figure


PARTS: dict[PartName, Part] = {
    "components": Part(
        "Components of attention",
        "B {batch_size}, S {seq_len}, D {d_model}, H {num_heads}, {precision}. MB moved are the minimum.",
        components, component_figure, "Time of each component of attention",
    ),
    "optimizations": Part(
        "Optimization levels", "{heads}; without gradients.", over_lengths("ms", "baseline", "compiled", "sdpa", "flash"),
        line_figure, "Time over the sequence length, a line for each level",
    ),
    "frameworks": Part(
        "PyTorch and JAX", "{heads}; without gradients, the same inputs. JAX: {jax}.",
        over_lengths("ms", "PyTorch eager", "PyTorch compiled", "JAX jit"),
        line_figure, "Time over the sequence length, a line for each framework",
    ),
    "memory": Part(
        "Memory over the sequence length", "{heads}. The memory that one call adds to what was allocated before it.",
        over_lengths("MiB", "baseline", "chunked", "sdpa"),
        line_figure, "Memory over the sequence length, a line for each way",
    ),
    "bottlenecks": Part("Four bottlenecks", "The first way is the mistake, the others do the same work.", bottlenecks),
    "fixes": Part("Four fixes", "Training steps of Version 1, preset {preset}, each fix in a process of its own.", fixes),
    "layer": Part(
        "One layer by span", "Forward and backward of one layer of Version 1, preset {preset}: {layer_ms} ms undisturbed.", layer,
    ),
}  # fmt: skip


def _documented(part: PartName, *folders: Path) -> str:
    """A part as a Markdown table, with the devices one below the other, each named in the first of its rows."""
    header: list[str] = []
    body: list[list[object]] = []
    for folder in folders:
        if not (folder / FILE).exists():
            raise UsageError(f"no {FILE} in {folder}: measure with run_lab.py --output {folder / FILE}")
        result = read(folder / FILE, Lab)
        if result[part] is None:
            raise UsageError(f"{part} was not measured for {folder / FILE}: run run_lab.py without --parts")
        header, rows = PARTS[part].rows(result[part])
        body += [["" if i else run_facts.device(result), *row] for i, row in enumerate(rows)]
    return tables.markdown(["device", *header], body)


TABLES: dict[str, Callable[..., str]] = {f"lab-{part}": functools.partial(_documented, part) for part in PARTS}


def analyze(path: Path) -> Report:
    """A section for each part that a profiling_lab.json holds. UsageError: the file is missing, damaged, or of another schema."""
    result = read(path, Lab)
    sizes, ceilings = result["sizes"], result["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["environment"].items() if version)
    fields = {
        **sizes, "precision": result["precision"], "jax": result["jax"] or "not here",
        "heads": f"B 1, H {sizes['num_heads']}, dk {sizes['d_model'] // sizes['num_heads']}, {result['precision']}",
        "layer_ms": result["layer"] and tables.format_number(result["layer"]["ms"]),
    }  # fmt: skip
    report, missing = Report("Profiling lab"), []
    report.section("Conditions")
    report.text(f"{run_facts.device(result)}; {versions}; {result['date']}.")
    report.table(["ceiling", "measured"], [
        ["GEMM, TFLOP/s", 1e-12 * ceilings["flops_per_second"]],
        ["copy, GB/s", 1e-9 * ceilings["bytes_per_second"]],
        ["one small operation, us", 1e6 * ceilings["operation_seconds"]],
    ])  # fmt: skip
    report.commands([f"python {result['command']}"])
    for name, part in PARTS.items():
        if result[name] is None:
            missing.append(part.title)
            continue
        rows = part.rows(result[name])
        report.section(part.title, name)
        report.text(part.text.format(**fields))
        if name == "components":
            report.text(*longest(rows))
        if name == "fixes" and result["fixes"]:
            report.text(*run_facts.noise({row["fix"]: row["step_ms"] for row in result["fixes"]}))
        if part.draw:
            report.figure(functools.partial(part.draw, rows), name, part.description)
        report.table(*rows)
        if name == "components" and result["components"]:
            add_roofline(report, result["components"], ceilings)
    if missing:
        report.section("Not measured", "missing")
        report.text(f"{', '.join(missing)}: run_lab.py without `--parts`.")
    return report


def longest(rows: Table) -> list[str]:
    """A sentence for each framework with the total of its components and the longest of them."""
    said = []
    for framework in dict.fromkeys(row[0] for row in rows[1]):
        found = [row for row in rows[1] if row[0] == framework]
        total, (_, name, _, share, *_) = sum(row[2] for row in found), max(found, key=lambda row: row[2])
        longest_part = f"{name} takes longest, {tables.format_number(share)} % of it"
        said.append(f"{framework}: {tables.format_number(total)} ms in total; {longest_part}.")
    return said


def add_roofline(report: Report, components: Components, ceilings: Ceilings) -> None:
    points = [
        roofline.Point(row["name"], row["flops"], row["bytes_moved"], row["time_ms"] / 1e3, NAMES[framework])
        for framework, results in components.items()
        for row in results or []
    ]
    figure = roofline.figure(points, ceilings)
    figure.axes[0].set_title("")  # the conditions give the ceilings
    report.section("Roofline")
    report.text("How near each component is to its bound. Above 100 % the data came from a cache, or the ceiling is too low.")
    if all(components.values()):
        report.text(f"Filled points are {', open points '.join(NAMES[name] for name in components)}.")
    report.figure(lambda: figure, "roofline", "FLOP/s of each component under the roofline")
    report.table(*roofline.table(points, ceilings))
