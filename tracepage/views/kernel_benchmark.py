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
    return (
        100
        * rate(row)
        / (ceilings["bytes_per_second"] if row["unit"] == BYTES else ceilings["flops_per_second"])
    )


def ratio(row: TimedKernel, other: TimedKernel) -> float:
    """Time of `row` over the time of `other`, on the GPU where both have it, else of the host."""
    if row["gpu_ms"] and other["gpu_ms"]:
        return row["gpu_ms"]["median"] / other["gpu_ms"]["median"]
    return row["host_ms"]["median"] / other["host_ms"]["median"]


def analyze(path: Path) -> Report:
    """The report on a metrics_kernels.json."""
    return report(files.read(path, KernelBenchmark))


def report(measured: KernelBenchmark) -> Report:
    """Each operation and shape: the kernel's rate and its peers' time relative to it; then the
    times of every contender.
    """
    result = Report("Kernel benchmark")
    result.text(
        f"Forward and backward of each operation, {measured['precision']['compute']}, {measured['device']['name']}, torch "
        f"{measured['environment']['torch']}."
    )
    # without a GPU PyTorch is timed alone
    if any(row["contender"] == "kernel" for row in measured["rows"]):
        result.section("Rates")
        result.table(*rate_table(measured))
    result.section("Times")
    result.table(*time_table(measured))
    return result


def rate_table(measured: KernelBenchmark) -> tables.Table:
    """A row per operation and shape: the kernel's rate, each peer's time relative to the kernel's,
    and memory.
    """
    shapes: dict[tuple[object, ...], dict[str, TimedKernel]] = {}
    for row in measured["rows"]:
        shapes.setdefault(kernel_shape(row), {})[row["contender"]] = row
    body: list[list[object]] = []
    for (operation, batch, length, hidden), found in shapes.items():
        own = found["kernel"]
        reached = rate(own) / (1e9 if own["unit"] == BYTES else 1e12)
        body.append(
            [
                operation,
                f"{batch} x {length}",
                hidden,
                f"{tables.format_number(reached)} {own['unit']}",
                share(own, measured),
                *(ratio(found[name], own) if name in found else None for name in PEERS),
                own["peak_mib"],
                found["eager"]["peak_mib"],
            ]
        )
    header = [
        "operation",
        "B x S",
        "D",
        "kernel",
        "% of ceiling",
        *(f"{name} / kernel" for name in PEERS),
        "kernel's MiB",
        "eager's MiB",
    ]
    return tables.filled(header, body)


def time_table(measured: KernelBenchmark) -> tables.Table:
    """A row per operation, shape and contender: times, rate, share of the ceiling, speed relative
    to eager, memory.
    """
    eager = {kernel_shape(row): row for row in measured["rows"] if row["contender"] == "eager"}
    unit, factor = tables.time_unit(max(row["host_ms"]["median"] for row in measured["rows"]))
    body: list[list[object]] = [
        [
            row["operation"],
            f"{row['batch_size']} x {row['sequence_length']}",
            row["hidden_size"],
            row["contender"],
            row["host_ms"]["median"] * factor,
            row["gpu_ms"] and row["gpu_ms"]["median"] * factor,
            rate(row) / 1e9 if row["unit"] == BYTES else None,
            rate(row) / 1e12 if row["unit"] == FLOPS else None,
            share(row, measured),
            ratio(eager[kernel_shape(row)], row),
            row["peak_mib"],
        ]
        for row in measured["rows"]
    ]
    header = [
        "operation",
        "B x S",
        "D",
        "contender",
        f"host {unit}",
        f"GPU {unit}",
        BYTES,
        FLOPS,
        "% of ceiling",
        "eager / it",
        "MiB",
    ]
    return tables.filled(header, body)
