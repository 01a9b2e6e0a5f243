"""Tables and figure of a benchmark of kernels, from its JSON file (version3_triton/benchmark_kernels.py says what is in it)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.analysis.output import plots, tables
from common.files import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "tiny-llama-kernel-benchmark/1"
BYTES, FLOPS = "GB/s", "TFLOP/s"
COLOURS = {
    "kernel": plots.BLUE, "eager": plots.BLACK, "compiled": plots.ORANGE, "liger": plots.GREEN, "cudnn": plots.PURPLE,
    "flash": plots.SKY,
}  # fmt: skip
Row = dict[str, Any]


def _place(row: Row) -> tuple[Any, ...]:
    return row["operation"], row["batch_size"], row["sequence_length"], row["hidden_size"]


def rate(row: Row) -> float:
    """Bytes or FLOPs a second, by the GPU's work alone where that was timed, else by the host's time."""
    return row["amount"] / (row["gpu_ms"] or row["host_ms"])["median"] * 1e3


def share(row: Row, measured: dict[str, Any]) -> float:
    """Percent of the measured ceiling: of the copy's bytes a second, or of the product's FLOPs."""
    return 100 * rate(row) / measured["ceilings"]["bytes_per_second" if row["unit"] == BYTES else "flops_per_second"]


def ratio(row: Row, other: Row) -> float:
    """How many times as long as the other, by the GPU's work alone where both have it, else by the host's time."""
    clock = "gpu_ms" if row["gpu_ms"] and other["gpu_ms"] else "host_ms"
    return row[clock]["median"] / other[clock]["median"]


def text(measured: dict[str, Any]) -> str:
    """A row per operation, shape and contender: times, rate, share of the ceiling, how often eager's speed, memory."""
    eager = {_place(row): row for row in measured["rows"] if row["contender"] == "eager"}
    body = []
    for row in measured["rows"]:
        body.append([
            row["operation"], f"{row['batch_size']} x {row['sequence_length']}", row["hidden_size"], row["contender"],
            row["host_ms"]["median"], row["gpu_ms"] and row["gpu_ms"]["median"],
            rate(row) / 1e9 if row["unit"] == BYTES else None, rate(row) / 1e12 if row["unit"] == FLOPS else None,
            share(row, measured), ratio(eager[_place(row)], row), row["peak_mib"],
        ])  # fmt: skip
    header = ["operation", "B x S", "D", "contender", "host ms", "GPU ms", "GB/s", "TFLOP/s", "% of ceiling", "eager / it",
              "MiB"]  # fmt: skip
    table = tables.text(*tables.filled(header, body))
    device, precision = measured["device"]["name"], measured["precision"]["compute"]
    return f"forward and backward of each operation, {precision}, {device}\n{table}"


def figure(measured: dict[str, Any]) -> "Figure":
    """Share of the ceiling over the sequence length: operations down, hidden sizes across, a line a contender."""
    rows = measured["rows"]
    names, widths = list(dict.fromkeys(row["operation"] for row in rows)), sorted({row["hidden_size"] for row in rows})
    drawing = plots.new(2.6 * len(widths) + 1, 2.2 * len(names))
    axes = drawing.subplots(len(names), len(widths), squeeze=False, sharex=True, sharey="row")
    for line, name in zip(axes, names, strict=True):
        for axis, width in zip(line, widths, strict=True):
            here = [row for row in rows if (row["operation"], row["hidden_size"]) == (name, width)]
            for who in dict.fromkeys(row["contender"] for row in here):
                own = [(row["sequence_length"], share(row, measured)) for row in here if row["contender"] == who]
                axis.plot(*zip(*sorted(own), strict=True), "o-", color=COLOURS[who], label=who, markersize=3)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.axhline(100, color="grey", linewidth=0.5)
        line[0].set_ylabel(f"{name}\n% of {'copy' if here[0]['unit'] == BYTES else 'matrix product'}")
    for axis, width in zip(axes[0], widths, strict=True):
        axis.set_title(f"D = {width}")
    for axis in axes[-1]:
        axis.set_xlabel("S")
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    drawing.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    return drawing


def documented(*paths: Path) -> str:
    """Markdown: a row for each operation and shape, with the kernel's rate and how many times as long each peer takes."""
    rows, peers = [], [name for name in COLOURS if name != "kernel"]
    for path in paths:
        measured = read_json(path, SCHEMA)
        shapes: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in measured["rows"]:
            shapes.setdefault(_place(row), {})[row["contender"]] = row
        for (operation, batch, length, hidden), found in shapes.items():
            own = found["kernel"]
            reached = rate(own) / (1e9 if own["unit"] == BYTES else 1e12)
            rows.append([
                operation, f"{batch} x {length}", hidden, f"{tables.figure(reached)} {own['unit']}", share(own, measured),
                *(ratio(found[name], own) if name in found else None for name in peers),
                own["peak_mib"], found["eager"]["peak_mib"],
            ])  # fmt: skip
    header = ["operation", "B x S", "D", "kernel", "% of ceiling", *(f"{name} / kernel" for name in peers), "kernel's MiB",
              "eager's MiB"]  # fmt: skip
    return tables.markdown(*tables.filled(header, rows))


TABLES = {"kernel_benchmark": documented}
