"""Tables and figure of a benchmark of kernels, from its JSON file (version3_triton/benchmark_kernels.py says what is in it)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.analysis import plots, tables
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


def timed(measured: dict[str, Any]) -> list[tuple[Row, float]]:
    """Each row with its ms: the GPU's work alone where all contenders of that operation and shape have it, else the host's."""
    by_host = {_place(row) for row in measured["rows"] if row["gpu_ms"] is None}
    return [(row, row["host_ms" if _place(row) in by_host else "gpu_ms"]["median"]) for row in measured["rows"]]


def share(row: Row, ms: float, measured: dict[str, Any]) -> float:
    """Percent of the measured ceiling: of the copy's bytes a second, or of the product's FLOPs."""
    ceiling = measured["ceilings"]["bytes_per_second" if row["unit"] == BYTES else "flops_per_second"]
    return 100 * row["amount"] / ms * 1e3 / ceiling


def text(measured: dict[str, Any]) -> str:
    """A row per operation, shape and contender: times, rate, share of the ceiling, how often eager's speed, memory."""
    eager = {_place(row): ms for row, ms in timed(measured) if row["contender"] == "eager"}
    body = []
    for row, ms in timed(measured):
        rate = row["amount"] / ms * 1e3
        body.append([
            row["operation"], f"{row['batch_size']} x {row['sequence_length']}", row["hidden_size"], row["contender"],
            row["host_ms"]["median"], row["gpu_ms"] and row["gpu_ms"]["median"],
            rate / 1e9 if row["unit"] == BYTES else None, rate / 1e12 if row["unit"] == FLOPS else None,
            share(row, ms, measured), eager[_place(row)] / ms, row["peak_mib"],
        ])  # fmt: skip
    header = ["operation", "B x S", "D", "contender", "host ms", "GPU ms", "GB/s", "TFLOP/s", "% of ceiling", "eager / it",
              "MiB"]  # fmt: skip
    table = tables.text(*tables.filled(header, body))
    device, precision = measured["device"]["name"], measured["precision"]["compute"]
    return f"forward and backward of each operation, {precision}, {device}\n{table}"


def figure(measured: dict[str, Any]) -> "Figure":
    """Share of the ceiling over the sequence length: operations down, hidden sizes across, a line a contender."""
    rows = timed(measured)
    names, widths = list(dict.fromkeys(row["operation"] for row, _ in rows)), sorted({row["hidden_size"] for row, _ in rows})
    drawing = plots.new(2.6 * len(widths) + 1, 2.2 * len(names))
    axes = drawing.subplots(len(names), len(widths), squeeze=False, sharex=True, sharey="row")
    for line, name in zip(axes, names, strict=True):
        for axis, width in zip(line, widths, strict=True):
            here = [(row, ms) for row, ms in rows if (row["operation"], row["hidden_size"]) == (name, width)]
            for who in dict.fromkeys(row["contender"] for row, _ in here):
                own = [(row["sequence_length"], share(row, ms, measured)) for row, ms in here if row["contender"] == who]
                axis.plot(*zip(*sorted(own), strict=True), "o-", color=COLOURS[who], label=who, markersize=3)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.axhline(100, color="grey", linewidth=0.5)
        line[0].set_ylabel(f"{name}\n% of {'copy' if here[0][0]['unit'] == BYTES else 'matrix product'}")
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
        shapes: dict[tuple[Any, ...], dict[str, tuple[Row, float]]] = {}
        for row, ms in timed(measured):
            shapes.setdefault(_place(row), {})[row["contender"]] = row, ms
        for (operation, batch, length, hidden), found in shapes.items():
            own, ms = found["kernel"]
            rate = own["amount"] / ms * 1e3 / (1e9 if own["unit"] == BYTES else 1e12)
            ratios = [found[name][1] / ms if name in found else None for name in peers]
            rows.append([
                operation, f"{batch} x {length}", hidden, f"{tables.figure(rate)} {own['unit']}", share(own, ms, measured),
                *ratios, own["peak_mib"], found["eager"][0]["peak_mib"],
            ])  # fmt: skip
    header = ["operation", "B x S", "D", "kernel", "% of ceiling", *(f"{name} / kernel" for name in peers), "kernel's MiB",
              "eager's MiB"]  # fmt: skip
    return tables.markdown(*tables.filled(header, rows))


TABLES = {"kernel_benchmark": documented}
