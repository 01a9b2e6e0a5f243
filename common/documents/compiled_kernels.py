"""Tables of what each kernel needs of a multiprocessor, from results/compiled/ (written by version3_triton/compile_kernels.py).

kernels.json holds a row for each compiled kernel, with one Triton; compile_kernels.py says what the numbers are. tritons.json
holds a summary for each Triton that was tried: a row for each target, and the kernels that spill.
"""

from pathlib import Path

from common.analysis.output import tables
from common.files import read
from common.records.kernel_files import Compiled, CompiledSummary, SpillingKernel, Spills, Target


def summary(paths: list[Path]) -> Spills:
    """What a CompiledSummary says, in the order of these files with rows. UsageError: a file is damaged or of another schema."""
    files = [read(path, Compiled) for path in paths]
    rows: list[SpillingKernel] = [{"triton": content["triton"], **row} for content in files for row in content["rows"]]
    targets: list[Target] = []
    for triton, target in dict.fromkeys((row["triton"], row["target"]) for row in rows):
        own = [row for row in rows if (row["triton"], row["target"]) == (triton, target)]
        spills = [row["spills"] for row in own if row["spills"]]
        targets.append({
            "triton": triton, "target": target, "compiled": len(own), "spilling": len(spills),
            "largest_spill": max(spills, default=0), "least_registers": min(row["registers"] for row in own),
            "largest_shared_bytes": max(row["shared_bytes"] for row in own),
        })  # fmt: skip
    return {"targets": targets, "spilling": [row for row in rows if row["spills"]]}


def machine_code(folder: Path) -> str:
    """A row per kernel of attention and a column per AMD target: instructions, registers, LDS and occupancy in bf16, Dh = 128."""
    rows = [
        row for row in read(folder / "kernels.json", Compiled)["rows"]
        if (row["file"], row.get("dtype"), row.get("size")) == ("flash_attention", "bf16", "Dh = 128") and row.get("mfma")
    ]  # fmt: skip
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        instructions = f"{row['mfma']} / {row['memory']} / {row['lds']}"
        kib = row["shared_bytes"] // 1024
        cells.setdefault(row["kernel"], {})[row["target"]] = f"{instructions}; {row['registers']}; {kib}; {row['occupancy']}%"
    targets = list(dict.fromkeys(row["target"] for row in rows))
    return tables.markdown(["kernel", *targets], [[kernel, *map(row.get, targets)] for kernel, row in cells.items()])


def tritons(folder: Path) -> str:
    """A row per Triton, a column per target: how many kernels spill, of how many, and the largest spill."""
    cells: dict[str, dict[str, str]] = {}
    for row in read(folder / "tritons.json", CompiledSummary)["targets"]:
        largest = f", at most {row['largest_spill']}" if row["spilling"] else ""
        cells.setdefault(row["triton"], {})[row["target"]] = f"{row['spilling']} of {row['compiled']}{largest}"
    targets = sorted({target for row in cells.values() for target in row})
    return tables.markdown(["Triton", *targets], [[triton, *map(row.get, targets)] for triton, row in cells.items()])
