"""The Triton kernels of a profile: launches, time, share of a step, and rate relative to the measured ceilings."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from common.analysis.formulas.own_kernels import Cost
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.analysis.reports import profile_summary
from common.records.fields import Ceilings
from common.records.step_profile import Profile

RATES = ("GB/s", "% of copy", "TFLOP/s", "% of GEMM")
HOW_TO_READ = (
    "Bytes and FLOPs follow from the shapes, with every element moved once; GB/s and TFLOP/s are these over the time. Above 100 "
    "% of a copy's bandwidth, data came from a cache. `% of kernels` is the share of all time on the GPU, libraries included."
)


def rates(moved: float | None, flops: float | None, seconds: float, ceilings: Ceilings | None) -> list[float | None]:
    """The cells under RATES for bytes and FLOPs in a time; None where they or the ceilings are not known."""
    bandwidth, peak = (ceilings["bytes_per_second"], ceilings["flops_per_second"]) if ceilings else (None, None)
    cells: list[float | None] = []
    for amount, unit, ceiling in ((moved, 1e9, bandwidth), (flops, 1e12, peak)):
        rate = amount / seconds if amount and seconds else None
        cells += [rate and rate / unit, rate and ceiling and 100 * rate / ceiling]
    return cells


def table(profile: Profile, costs: Mapping[tuple[str, str], Cost]) -> tables.Table:
    """Header and a row per kernel and phase of a mean step that has a cost, by name and phase, the longest first."""
    calls: dict[tuple[str, str], int] = defaultdict(int)
    us: dict[tuple[str, str], float] = defaultdict(float)
    for kernel in profile["kernels"]:
        calls[kernel["name"], kernel["phase"]] += kernel["calls"]
        us[kernel["name"], kernel["phase"]] += kernel["device_us"]
    steps, whole, rows = profile["profiled_steps"], sum(us.values()) or 1.0, []
    for key in sorted(us.keys() & costs.keys(), key=lambda key: -us[key]):
        cost, seconds = costs[key], us[key] / steps / 1e6
        rows.append([
            key[0].strip("_"), key[1], cost.operation, calls[key] / steps, seconds * 1e6, 100 * us[key] / whole,
            cost.bytes and cost.bytes / 1e6, *rates(cost.bytes, cost.flops, seconds, profile["run"]["ceilings"]),
        ])  # fmt: skip
    return ["kernel", "phase", "operation", "launches", "us", "% of kernels", "MB", *RATES], rows


def report(path: Path, profile: Profile, costs: Mapping[tuple[str, str], Cost], sort_by: str | None = None) -> Report:
    """Conditions of the run and the table; the summary of the profile instead where no kernel of `costs` ran."""
    header, rows = table(profile, costs)
    result = Report("Triton kernels of a mean step")
    if not rows:
        result.text("No Triton kernel ran in this profile.")
        profile_summary.add_section(result, path, profile, sort_by)
        return result
    us, share = sum(row[4] for row in rows), sum(row[5] for row in rows)
    whole = "attention's kernels, which alone were kept" if profile["attention_only"] else "all kernels"
    result.text(
        f"{profile_summary.conditions(profile)}.",
        f"Triton kernels take {tables.format_time(us / 1e3)} of a step, {share:.1f} % of the time of {whole}.",
    )
    result.table(header, rows)
    result.text(HOW_TO_READ)
    return result
