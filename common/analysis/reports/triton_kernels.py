"""The Triton kernels of a profile: launches, time and share of a step, and how near each comes to the measured ceilings."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

from common.analysis.output import tables
from common.analysis.reports import profile_summary

READ = """Bytes and FLOPs follow from the shapes, every number moved once; GB/s and TFLOP/s are those over the time. Above 100 %
of a copy's bandwidth, data came from a cache. "% of kernels" is of the time of all that ran on the GPU, libraries included."""


class Cost(Protocol):
    """All launches of a kernel in one step; `bytes` is None where no formula says, `flops` where memory is the limit."""

    operation: str
    bytes: int | None
    flops: int | None


def table(profile: dict[str, Any], costs: Mapping[tuple[str, str], Cost]) -> tuple[list[str], list[list[Any]]]:
    """Header and a row per kernel and phase of a mean step, the longest first.

    Args:
        profile: schema tiny-llama-profile/1.
        costs: by a kernel's name and phase; kernels that are not in it are not shown.
    """
    steps, ceilings = profile["profiled_steps"], profile["run"]["ceilings"]
    calls, us = defaultdict(int), defaultdict(float)
    for kernel in profile["kernels"]:
        calls[kernel["name"], kernel["phase"]] += kernel["calls"]
        us[kernel["name"], kernel["phase"]] += kernel["device_us"]
    whole, rows = sum(us.values()), []
    for key in sorted(us.keys() & costs.keys(), key=lambda key: -us[key]):
        cost, seconds = costs[key], us[key] / steps / 1e6
        moved, computed = (amount and amount / seconds for amount in (cost.bytes, cost.flops))
        rows.append([
            key[0].strip("_"), key[1], cost.operation, calls[key] / steps, seconds * 1e6, 100 * us[key] / whole,
            cost.bytes and cost.bytes / 1e6, moved and moved / 1e9, moved and 100 * moved / ceilings["bytes_per_second"],
            computed and computed / 1e12, computed and 100 * computed / ceilings["flops_per_second"],
        ])  # fmt: skip
    header = ["kernel", "phase", "operation", "launches", "us", "% of kernels", "MB", "GB/s", "% of copy", "TFLOP/s", "% of GEMM"]
    return header, rows


def text(profile: dict[str, Any], costs: Mapping[tuple[str, str], Cost], sort_by: str | None = None) -> str:
    """For a terminal: what ran on what, and the table; the operators instead where no kernel of `costs` ran."""
    header, rows = table(profile, costs)
    if not rows:
        return f"no Triton kernel ran in this profile\n{profile_summary.text(profile, sort_by)}"
    total = sum(row[4] for row in rows), sum(row[5] for row in rows)
    whole = "attention's kernels, which alone were kept" if profile["attention_only"] else "all kernels"
    summary = f"Triton kernels: {total[0]:,.0f} us a step, {total[1]:.1f} % of the time of {whole}"
    return "\n".join([profile_summary.conditions(profile), summary, "", tables.text(header, rows), "", READ])
