"""Tables and figure of a benchmark of kernels, from its JSON file (version3_triton/benchmark_kernels.py explains it)."""

from pathlib import Path

from common import files
from common.analysis.output import plots, tables
from common.analysis.output.report import PAGE_INCHES, Report
from common.records.study_files import KernelBenchmark, TimedKernel, kernel_shape

from matplotlib.figure import Figure

BYTES, FLOPS = "GB/s", "TFLOP/s"
COLOURS = {
    "kernel": plots.BLUE, "eager": plots.BLACK, "compiled": plots.ORANGE, "liger": plots.GREEN, "cudnn": plots.PURPLE,
    "flash": plots.SKY,
}  # fmt: skip


def rate(row: TimedKernel) -> float:
    """Bytes or FLOPs per second, by the time on the GPU where it was measured, else by the host's time."""
    return row["amount"] / (row["gpu_ms"] or row["host_ms"])["median"] * 1e3


def share(row: TimedKernel, measured: KernelBenchmark) -> float:
    """Percent of the measured ceiling: of the bandwidth of a copy, or of the FLOP/s of a matrix product."""
    ceilings = measured["ceilings"]
    return 100 * rate(row) / (ceilings["bytes_per_second"] if row["unit"] == BYTES else ceilings["flops_per_second"])


def ratio(row: TimedKernel, other: TimedKernel) -> float:
    """Time of `row` over the time of `other`, on the GPU where both have it, else of the host."""
    if row["gpu_ms"] and other["gpu_ms"]:
        return row["gpu_ms"]["median"] / other["gpu_ms"]["median"]
    return row["host_ms"]["median"] / other["host_ms"]["median"]


def analyze(path: Path) -> Report:
    """The report on a metrics_kernels.json."""
    return report(files.read(path, KernelBenchmark))


def report(measured: KernelBenchmark) -> Report:
    """Each operation and shape: the kernel's rate and its peers' time relative to it; then the times of every contender."""
    result = Report("Kernel benchmark")
    result.text(
        f"Forward and backward of each operation, {measured['precision']['compute']}, {measured['device']['name']}, torch "
        f"{measured['environment']['torch']}."
    )
    if any(row["contender"] == "kernel" for row in measured["rows"]):  # without a GPU PyTorch is timed alone
        result.section("Rates")
        result.table(*rate_table(measured))
    result.section("Times")
    result.table(*time_table(measured))
    result.figure(lambda: figure(measured), "kernels", "Share of the measured ceiling over the sequence length")
    return result


def rate_table(measured: KernelBenchmark) -> tables.Table:
    """A row per operation and shape: the kernel's rate, each peer's time relative to the kernel's, and memory."""
    shapes: dict[tuple[object, ...], dict[str, TimedKernel]] = {}
    for row in measured["rows"]:
        shapes.setdefault(kernel_shape(row), {})[row["contender"]] = row
    peers = [name for name in COLOURS if name != "kernel"]
    body: list[list[object]] = []
    for (operation, batch, length, hidden), found in shapes.items():
        own = found["kernel"]
        reached = rate(own) / (1e9 if own["unit"] == BYTES else 1e12)
        body.append([
            operation, f"{batch} x {length}", hidden, f"{tables.format_number(reached)} {own['unit']}", share(own, measured),
            *(ratio(found[name], own) if name in found else None for name in peers),
            own["peak_mib"], found["eager"]["peak_mib"],
        ])  # fmt: skip
    header = ["operation", "B x S", "D", "kernel", "% of ceiling", *(f"{name} / kernel" for name in peers), "kernel's MiB",
              "eager's MiB"]  # fmt: skip
    return tables.filled(header, body)


def time_table(measured: KernelBenchmark) -> tables.Table:
    """A row per operation, shape and contender: times, rate, share of the ceiling, speed relative to eager, memory."""
    eager = {kernel_shape(row): row for row in measured["rows"] if row["contender"] == "eager"}
    unit, factor = tables.time_unit(max(row["host_ms"]["median"] for row in measured["rows"]))
    body: list[list[object]] = [
        [row["operation"], f"{row['batch_size']} x {row['sequence_length']}", row["hidden_size"], row["contender"],
         row["host_ms"]["median"] * factor, row["gpu_ms"] and row["gpu_ms"]["median"] * factor,
         rate(row) / 1e9 if row["unit"] == BYTES else None, rate(row) / 1e12 if row["unit"] == FLOPS else None,
         share(row, measured), ratio(eager[kernel_shape(row)], row), row["peak_mib"]]
        for row in measured["rows"]
    ]  # fmt: skip
    header = ["operation", "B x S", "D", "contender", f"host {unit}", f"GPU {unit}", BYTES, FLOPS, "% of ceiling", "eager / it",
              "MiB"]  # fmt: skip
    return tables.filled(header, body)


def figure(measured: KernelBenchmark) -> Figure:
    """Share of the ceiling over the sequence length: operations down, hidden sizes across, a line for each contender."""
    rows = measured["rows"]
    names, widths = list(dict.fromkeys(row["operation"] for row in rows)), sorted({row["hidden_size"] for row in rows})
    drawing = plots.new(max(PAGE_INCHES, 2.6 * len(widths) + 1), 2.2 * len(names) + 0.6)
    panels = drawing.subplots(len(names), len(widths), squeeze=False, sharex=True, sharey="row")
    for name, line in zip(names, panels, strict=True):
        for width, axes in zip(widths, line, strict=True):
            own = [row for row in rows if (row["operation"], row["hidden_size"]) == (name, width)]
            for who in dict.fromkeys(row["contender"] for row in own):
                points = sorted((row["sequence_length"], share(row, measured)) for row in own if row["contender"] == who)
                axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[who], label=who, markersize=3)
            axes.axhline(100, color="grey", linewidth=0.5)
            axes.set(xscale="log", xlabel="S", title=f"D = {width:,}", ylim=(0, None))
        ceiling = "copy" if own[0]["unit"] == BYTES else "GEMM"
        line[0].set_ylabel(f"{name}\n% of measured {ceiling}", fontsize=8)
    title = f"{measured['device']['name']}, {measured['precision']['compute']}, torch {measured['environment']['torch']}"
    lines = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawing.legend(
        list(lines.values()), list(lines), loc="outside upper center", ncols=3, fontsize=8, title=title, title_fontsize=8
    )
    return drawing
