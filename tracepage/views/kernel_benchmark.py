"""Tables of a benchmark of kernels, from its JSON file (version3_triton/benchmark_kernels.py
explains it).
"""

from pathlib import Path

from tracepage import files
from tracepage.records.study_files import KernelBenchmark, TimedKernel, kernel_shape
from tracepage.show import tables
from tracepage.show.report import Report

BYTES = "GB/s"
FLOPS = "TFLOP/s"
UNITS = {BYTES: 1e9, FLOPS: 1e12}
PEERS = ("eager", "compiled", "liger", "cudnn", "flash")


def rate(row: TimedKernel) -> float:
    """Bytes or FLOPs per second, by the time on the GPU where it was measured, else by the host's
    time.
    """
    return row["amount"] / (row["gpu_ms"] or row["host_ms"])["median"] * 1e3


def share(row: TimedKernel, measured: KernelBenchmark) -> float:
    """Percent of the measured ceiling: of the bandwidth of a copy, or of the FLOP/s of a matrix
    product.
    """
    ceilings = measured["ceilings"]
    memory = row["unit"] == BYTES
    return 100 * rate(row) / ceilings["bytes_per_second" if memory else "flops_per_second"]


def ratio(row: TimedKernel, other: TimedKernel) -> float:
    """Time of `row` over the time of `other`, both timed in the same way."""
    if row["gpu_ms"] and other["gpu_ms"]:
        return row["gpu_ms"]["median"] / other["gpu_ms"]["median"]
    return row["host_ms"]["median"] / other["host_ms"]["median"]


def compared(row: TimedKernel, kernel: TimedKernel) -> float | str:
    """A peer's time over the kernel's; it says so where both are plain launches, because the peer
    cannot be replayed as a graph.
    """
    times = ratio(row, kernel)
    if kernel["gpu_ms"] and not row["gpu_ms"]:
        return f"{tables.format_number(times)} (launched)"
    return times


def render_kernel_benchmark(path: Path) -> Report:
    """Each operation and shape of a metrics_kernels.json: the kernel's rate and its peers' time
    relative to it; then the times of every contender.
    """
    measured = files.read(path, KernelBenchmark)
    report = Report("Kernel benchmark")
    report.text(
        f"Forward and backward of each operation, {measured['precision']['compute']}, "
        f"{measured['device']['name']}, torch {measured['environment']['torch']}."
    )
    # Without a GPU PyTorch is timed alone.
    if any(row["contender"] == "kernel" for row in measured["rows"]):
        report.section("Rates")
        report.table(*rate_table(measured))
    report.section("Times")
    report.table(*time_table(measured))
    return report


def rate_table(measured: KernelBenchmark) -> tables.Table:
    """A row per operation and shape: the kernel's rate, each peer's time relative to the kernel's,
    and the memory of all.
    """
    shapes: dict[tuple[str, int, int, int], dict[str, TimedKernel]] = {}
    for row in measured["rows"]:
        shapes.setdefault(kernel_shape(row), {})[row["contender"]] = row
    rows = []
    for (operation, batch, length, hidden), contenders in shapes.items():
        kernel = contenders["kernel"]
        reached = tables.format_number(rate(kernel) / UNITS[kernel["unit"]])
        peers = [contenders.get(name) for name in PEERS]
        ratios = [compared(peer, kernel) if peer else None for peer in peers]
        peaks = [peer["peak_mib"] if peer else None for peer in (kernel, *peers)]
        head = [operation, f"{batch} x {length}", hidden, f"{reached} {kernel['unit']}"]
        rows.append([*head, share(kernel, measured), *ratios, *peaks])
    header = ["operation", "B x S", "D", "kernel", "% of ceiling"]
    header += [f"{name} / kernel" for name in PEERS]
    header += [f"{name}'s MiB" for name in ("kernel", *PEERS)]
    return tables.filled(header, rows)


def time_table(measured: KernelBenchmark) -> tables.Table:
    """A row per operation, shape and contender: times, rate, share of the ceiling, speed relative
    to eager, memory.
    """
    eager = {kernel_shape(row): row for row in measured["rows"] if row["contender"] == "eager"}
    unit, factor = tables.time_unit(max(row["host_ms"]["median"] for row in measured["rows"]))
    rows = []
    for row in measured["rows"]:
        operation, batch, length, hidden = kernel_shape(row)
        head = [operation, f"{batch} x {length}", hidden, row["contender"]]
        gpu = row["gpu_ms"] and row["gpu_ms"]["median"] * factor
        rates = [
            rate(row) / scale if row["unit"] == name else None for name, scale in UNITS.items()
        ]
        speed = ratio(eager[kernel_shape(row)], row)
        times = [row["host_ms"]["median"] * factor, gpu]
        rows.append([*head, *times, *rates, share(row, measured), speed, row["peak_mib"]])
    header = ["operation", "B x S", "D", "contender", f"host {unit}", f"GPU {unit}", *UNITS]
    return tables.filled([*header, "% of ceiling", "eager / it", "MiB"], rows)
