"""Memory of a run by its record: reserved beside allocated, and by formula what would save memory.

PyTorch's allocator reserves segments of a GPU's memory and cuts blocks out of them. What is
reserved and not allocated is free, in pieces that a later request may not fit.
"""

from tracepage.cost import flops, footprint
from tracepage.records.run_record import AnyRun
from tracepage.records.step_profile import Profile
from tracepage.show.report import Report
from tracepage.show.tables import format_number

MIB = 2**20
ABOUT_SAVINGS = (
    "Each row is one change alone, by the formulas of TINY_LLAMA_ARCHITECTURE.md, section 5. Rows "
    "that share tensors do not add up, and a saving counts only where the peak is."
)


def reserved(run: AnyRun) -> str:
    """The memory that the allocator reserved, and how much of it was not allocated."""
    memory = run["memory"]
    if memory["kind"] != "GPU allocator":
        return "none: on a CPU PyTorch keeps no pool of memory"
    if "reserved_mib" not in memory:
        return "not in this record"
    pool = memory["reserved_mib"]
    peak = memory["peak_mib"]
    unused = f"{format_number(pool - peak)} MiB ({100 * (1 - peak / pool):.3g} %) not allocated"
    note = "; measuring the ceilings left some of it" if run["ceilings"] else ""
    return f"{format_number(pool)} MiB, of which {unused}{note}"


def add_section(report: Report, profile: Profile) -> None:
    """Adds the peak, the reserved memory, and savings where a run has the formulas' operators."""
    run = profile["run"]
    peak = f"{format_number(run['memory']['peak_mib'])} MiB ({run['memory']['kind']})"
    report.facts([("peak", peak), ("reserved", reserved(run))])
    switches = run.get("settings", {}) | {"capture_step": False}
    plain = any(row["name"] == "aten::_softmax" for row in profile["operators"])
    if any(switches.values()) or not plain:
        return
    savings = footprint.savings(
        flops.sizes(run["model"]),
        run["training"]["batch_size"],
        run["training"]["sequence_length"],
        "cpu" if run["device"]["kind"] == "cpu" else "cuda",
        half=run["precision"]["compute"] != "fp32",
    )
    report.table(
        ["change", "saves MiB", "peak MiB", "formula"],
        [[change, saved / MIB, peak / MIB, formula] for change, formula, saved, peak in savings],
        "What would save memory in this run",
    )
    report.text(ABOUT_SAVINGS)
