"""What the profiling lab's run_lab.py measured, as tables and as one HTML page that needs no network and no script.

TABLES are the tables for documents, made from results/<device>/profiling_lab.json.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.analysis.output import plots, report, tables
from common.analysis.output.report import Section, Table
from common.analysis.reports import roofline
from common.errors import UsageError
from common.files import read_json, writable_file, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "tiny-llama-profiling-lab/1"
FILE = "profiling_lab.json"
OPTIMIZATIONS = ("baseline", "sdpa", "compiled", "flash")
FRAMEWORKS = ("PyTorch eager", "PyTorch compiled", "JAX jit")
MEMORY = ("baseline", "chunked", "sdpa")
NAMES = {"pytorch": "PyTorch", "jax": "JAX"}
COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILION)

Rows = tuple[list[str], list[list[Any]]]  # header and rows, as common.analysis.output.tables takes them


# ------------------------------------------------------------------------------------------------------ rows, by part


def components(measured: dict[str, Any]) -> Rows:
    """Each component of attention: time, share, memory, work, what binds it."""
    rows = []
    for framework, results in measured.items():
        total = sum(result["time_ms"] for result in results or [])
        for result in results or []:
            work = [result["flops"] / 1e9, result["bytes_moved"] / 1e6, result["flops"] / result["bytes_moved"]]
            memory = result["memory_mb"] if framework == "pytorch" else None  # JAX's was not measured
            share = 100 * result["time_ms"] / total
            rows.append([NAMES[framework], result["name"], result["time_ms"], share, memory, *work, result["bound"]])
    return ["framework", "component", "ms", "% of total", "MiB added", "GFLOP", "MB moved", "FLOP/byte", "bound"], rows


def optimizations(measured: list[dict[str, Any]]) -> Rows:
    """Attention at each optimization level, over S."""
    rows = [[row["seq_len"], *map(row["ms"].get, OPTIMIZATIONS)] for row in measured]
    return ["S", *(f"{name} ms" for name in OPTIMIZATIONS)], rows


def frameworks(measured: list[dict[str, Any]]) -> Rows:
    """The same attention in PyTorch and JAX, over S."""
    return ["S", *(f"{name} ms" for name in FRAMEWORKS)], [[row["seq_len"], *map(row["ms"].get, FRAMEWORKS)] for row in measured]


def memory(measured: list[dict[str, Any]]) -> Rows:
    """What one call of attention adds to memory at its peak, over S."""
    return ["S", *(f"{name} MiB" for name in MEMORY)], [[row["seq_len"], *(row[name] for name in MEMORY)] for row in measured]


def bottlenecks(measured: list[dict[str, Any]]) -> Rows:
    """Each bottleneck: the mistake, and the same work done better."""
    first: dict[str, float] = {}
    for row in measured:
        first.setdefault(row["bottleneck"], row["ms"])
    rows = [
        [row["bottleneck"].replace("_", " "), row["way"], row["ms"], f"{first[row['bottleneck']] / row['ms']:.2f}x"]
        for row in measured
    ]
    return ["bottleneck", "way", "ms", "against the first"], rows


def fixes(measured: list[dict[str, Any]]) -> Rows:
    """A training step of Version 1 with each fix."""
    rows = []
    for row in measured:
        step, plain = row["step_ms"], measured[0]["step_ms"]["median"]
        spread = f"{tables.figure(step['p20'])} to {tables.figure(step['p80'])}"
        peak = f"{tables.figure(row['peak_mib'])} ({row['kind']})"
        rows.append([row["fix"], step["median"], spread, f"{plain / step['median']:.2f}x", peak, f"{row['loss']:.4f}"])
    return ["fix", "ms/step", "p20 to p80", "against none", "peak MiB", "loss"], rows


def layer(measured: dict[str, Any]) -> Rows:
    """Where a pass through one layer spends its time."""
    whole, rows = measured["profiled_ms"], []
    for span, phases in measured["spans"].items():
        rows.append([span, phases.get("forward", 0.0), phases.get("backward", 0.0), 100 * sum(phases.values()) / whole])
    rest = 100 - sum(row[-1] for row in rows)
    rows.append(["idle GPU" if measured["on_gpu"] else "outside operators (Python)", None, None, rest])
    return ["span", "forward ms", "backward ms", "% of the profiled pass"], rows


ROWS: dict[str, Callable[[Any], Rows]] = {
    "components": components, "optimizations": optimizations, "frameworks": frameworks, "memory": memory,
    "bottlenecks": bottlenecks, "fixes": fixes, "layer": layer,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ for documents


def _documented(part: str, *folders: Path) -> str:
    """A part as a Markdown table, the devices one below the other."""
    header, body = [], []
    for folder in folders:
        if not (folder / FILE).exists():
            raise UsageError(f"no {FILE} in {folder}: measure with run_lab.py --output {folder / FILE}")
        result = read_json(folder / FILE, SCHEMA)
        if result[part] is None:
            raise UsageError(f"{part} was not measured for {folder / FILE}: run run_lab.py without --parts")
        header, rows = ROWS[part](result[part])
        body += [[_where(result), *row] for row in rows]
    return tables.markdown(["device", *header], body)


def _where(result: dict[str, Any]) -> str:
    threads = result["device"].get("threads")
    return f"{result['device']['name']}, {threads} threads" if threads else result["device"]["name"]


TABLES: dict[str, Callable[..., str]] = {f"lab-{part}": functools.partial(_documented, part) for part in ROWS}


# ------------------------------------------------------------------------------------------------------------ the page


def page(result: dict[str, Any]) -> str:
    """The dashboard: a section for each part that was measured, figures drawn inline."""
    sizes, wide = result["sizes"], {part: ROWS[part](result[part]) for part in ROWS if result[part] is not None}
    heads = f"B 1, H {sizes['num_heads']}, dk {sizes['d_model'] // sizes['num_heads']}, {result['precision']}"
    layer_ms = tables.figure(result["layer"]["ms"]) if result["layer"] else ""
    titles = {
        "components": "Components of attention", "optimizations": "Optimization levels", "frameworks": "PyTorch and JAX",
        "memory": "Memory over the sequence length", "bottlenecks": "Four bottlenecks", "fixes": "Four fixes",
        "layer": "One layer by span",
    }  # fmt: skip
    text = {
        "components": f"B {sizes['batch_size']}, S {sizes['seq_len']}, D {sizes['d_model']}, H {sizes['num_heads']}, "
        f"{result['precision']}. Bytes are the least that has to move.",
        "optimizations": f"{heads}; without gradients.",
        "frameworks": f"{heads}; without gradients, the same inputs. JAX: {result['jax'] or 'not here'}.",
        "memory": f"{heads}. What one call adds to the memory that was allocated before it.",
        "bottlenecks": "The first way is the mistake, the others do the same work.",
        "fixes": f"Training steps of Version 1, preset {sizes['preset']}, each fix in a process of its own.",
        "layer": f"Forward and backward of one layer of Version 1, preset {sizes['preset']}: {layer_ms} ms undisturbed.",
    }
    figures = {
        "components": (component_figure, "Time of each component of attention"),
        "optimizations": (lambda rows: line_figure(rows, "ms"), "Time over the sequence length, a line for each level"),
        "frameworks": (lambda rows: line_figure(rows, "ms"), "Time over the sequence length, a line for each framework"),
        "memory": (lambda rows: line_figure(rows, "MiB"), "Memory over the sequence length, a line for each way"),
    }
    sections = [conditions(result)]
    for part, rows in wide.items():
        notes = [text[part], *(longest(rows) if part == "components" else [])]
        draw, description = figures.get(part, (None, ""))
        drawn = draw(rows) if draw else None
        sections.append(Section(part, titles[part], notes, drawn, description, [Table("", *rows)]))
        if part == "components":
            sections.append(roofline_section(result))
    missing = [titles[part] for part in ROWS if part not in wide]
    if missing:
        sections.append(Section("missing", "Not measured", [f"{', '.join(missing)}: run_lab.py without `--parts`."]))
    return report.html("Profiling lab", sections)


def conditions(result: dict[str, Any]) -> Section:
    environment = ", ".join(f"{name} {version}" for name, version in result["environment"].items() if version)
    text = [f"{_where(result)}; {environment}; {result['date']}.", f"Measured ceilings: {ceilings_line(result['ceilings'])}."]
    return Section("conditions", "Conditions", text, commands=[f"python {result['command']}"])


def longest(rows: Rows) -> list[str]:
    """A sentence for each framework."""
    found = {framework: max((row for row in rows[1] if row[0] == framework), key=lambda row: row[2]) for framework, *_ in rows[1]}
    return [f"{name}: {row[1]} takes longest, {tables.figure(row[3])} % of the time." for name, row in found.items()]


def ceilings_line(ceilings: dict[str, Any]) -> str:
    small = tables.figure(1e6 * ceilings["operation_seconds"])
    return f"{roofline.describe(ceilings).removeprefix('measured ceilings: ')}; one small operation {small} us"


def roofline_section(result: dict[str, Any]) -> Section:
    points = [
        roofline.Point(row["name"], row["flops"], row["bytes_moved"], row["time_ms"] / 1e3, NAMES[framework])
        for framework, results in result["components"].items()
        for row in results or []
    ]
    text = ["How near each component is to what binds it. Above 100 % the data came from a cache, or the ceiling is too low."]
    figure, description = roofline.figure(points, result["ceilings"]), "FLOP/s of each component under the roofline"
    figure.axes[0].set_title("")  # the ceilings are in the conditions
    return Section("roofline", "Roofline", text, figure, description, [Table("", *roofline.table(points, result["ceilings"]))])


def component_figure(rows: Rows) -> "Figure":
    """Horizontal bars, a colour for each framework."""
    names = list(dict.fromkeys(row[1] for row in rows[1]))
    groups = list(dict.fromkeys(row[0] for row in rows[1]))
    result, height = plots.new(5, 1 + 0.45 * len(names)), 0.8 / len(groups)
    axes = result.subplots()
    for i, group in enumerate(groups):
        bars = [row[2] for row in rows[1] if row[0] == group]
        axes.barh([place + i * height for place in range(len(names))], bars, height, color=COLOURS[i], label=group)
    axes.set_yticks([place + height * (len(groups) - 1) / 2 for place in range(len(names))], names)
    axes.set(xlabel="ms")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    return result


def line_figure(rows: Rows, unit: str) -> "Figure":
    """A line for each column after the first, which is S; both axes logarithmic. Columns without values are left out."""
    header, body = rows
    result = plots.new(5, 3.4)
    axes = result.subplots()
    for i, name in enumerate(header[1:]):
        points = [(row[0], row[i + 1]) for row in body if row[i + 1]]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=COLOURS[i], label=name.removesuffix(f" {unit}"))
    axes.set(xscale="log", yscale="log", xlabel="sequence length S", ylabel=unit)
    axes.grid(True, which="both", color="0.9")
    axes.legend()
    return result


def write_page(results: Path, output: Path) -> None:
    """Makes the page `output` from a profiling_lab.json.

    Raises:
        UsageError: `results` is not of schema tiny-llama-profiling-lab/1, or `output` cannot be written.
    """
    result = read_json(results, SCHEMA)
    writable_file(output, "--output")
    write_text(output, page(result))
