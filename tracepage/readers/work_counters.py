"""Bytes that a GPU's memory moved for each kernel, and the FLOPs that it did, from the counters of
a profiler:

    ncu               dram__bytes_read.sum + dram__bytes_write.sum (dram__bytes.sum)
    rocprof-compute   requests of the L2 cache to memory, in pmc_perf.csv, times their size

A request has 32, 64 or, for reads on newer devices, 128 bytes. TCC_EA_RDREQ and TCC_EA_WRREQ
(TCC_EA0_ from gfx942 on) count all requests, RDREQ_32B the small reads, WRREQ_64B the large writes,
and TCC_BUBBLE on gfx942 the 128-byte reads. Hence

    read      64 RDREQ + 64 BUBBLE - 32 RDREQ_32B
    written   32 WRREQ + 32 WRREQ_64B

gfx90a has no 128-byte reads. On gfx950 TCC_BUBBLE has another meaning; since rocprof-compute 3.5
RDREQ_128B, _64B and _32B count reads by size. (AMD, "MI300 and MI200 Series performance counters
and metrics", rocm.docs.amd.com; rocprof-compute's metric "HBM Bandwidth" is this sum over the
time.) The requests can also go to the host or to another GPU.

rocprof-compute also counts the instructions of a wave's 64 work-items by number format (a fused
multiply-add has two FLOPs, and a packed instruction counts once, so fp16 and fp32 can be more), and
the matrix units' FLOPs in units of 512.
"""

from tracepage.readers.source import Source

import pandas

WRITES = {"WRREQ_sum": 32, "WRREQ_64B_sum": 32}
GFX90A = {"RDREQ_sum": 64, "RDREQ_32B_sum": -32} | WRITES
GFX950 = {"RDREQ_128B_sum": 128, "RDREQ_64B_sum": 64, "RDREQ_32B_sum": 32} | WRITES
# By source and device: counters that add up to the bytes that memory moved, and the bytes that each
# count stands for.
COUNTERS: dict[str, dict[str, dict[str, int]]] = {
    "ncu": {
        "reads and writes apart": {"dram__bytes_read.sum": 1, "dram__bytes_write.sum": 1},
        "reads and writes together": {"dram__bytes.sum": 1},
    },
    "rocprof-compute": {
        "gfx942": {f"TCC_EA0_{name}": size for name, size in GFX90A.items()}
        | {"TCC_BUBBLE_sum": 64},
        "gfx90a": {f"TCC_EA_{name}": size for name, size in GFX90A.items()},
        "gfx950": {f"TCC_EA0_{name}": size for name, size in GFX950.items()},
    },
}
# The same for FLOPs by number format, named as in roofline.csv.
FORMATS: dict[str, dict[str, int]] = {}
for bits in (16, 32, 64):
    FORMATS[f"fp{bits}"] = {
        f"SQ_INSTS_VALU_ADD_F{bits}": 64,
        f"SQ_INSTS_VALU_MUL_F{bits}": 64,
        f"SQ_INSTS_VALU_FMA_F{bits}": 128,
        f"SQ_INSTS_VALU_TRANS_F{bits}": 64,
    }
for name, kind in {"fp16": "F16", "fp32": "F32", "fp64": "F64", "bf16": "BF16"}.items():
    FORMATS[f"mfma_{name}"] = {f"SQ_INSTS_VALU_MFMA_MOPS_{kind}": 512}
NEWER_FORMATS = {"mfma_fp8": {"SQ_INSTS_VALU_MFMA_MOPS_F8": 512}}  # From gfx942 on.


def moved_bytes(source: Source) -> pandas.Series | str:
    """Bytes that memory moved for each row of the table, or the names of the counters that are
    missing.
    """
    formulas = dict(COUNTERS[source.kind])
    system = source.path.with_name("sysinfo.csv")  # rocprof-compute writes both.
    is_gfx950 = system.is_file() and "gfx950" in system.read_text(errors="replace")
    if is_gfx950 or "TCC_EA0_RDREQ_128B_sum" in source.counters:
        del formulas["gfx942"]
    missing = {name: _missing(source, formula) for name, formula in formulas.items()}
    nearest = min(missing, key=lambda name: len(missing[name]) / len(formulas[name]))
    if missing[nearest]:
        return f"{', '.join(missing[nearest])} ({nearest})"
    return _weighted(source, formulas[nearest])


def flops(source: Source) -> pandas.DataFrame:
    """FLOPs of each row of the table by number format, with no columns if the source does not count
    them all.
    """
    if any(_missing(source, formula) for formula in FORMATS.values()):
        return pandas.DataFrame(index=source.table.index)
    return pandas.DataFrame(
        {
            name: _weighted(source, formula)
            for name, formula in (FORMATS | NEWER_FORMATS).items()
            if not _missing(source, formula)
        }
    )


def _missing(source: Source, formula: dict[str, int]) -> list[str]:
    return [counter for counter in formula if counter not in source.counters]


def _weighted(source: Source, formula: dict[str, int]) -> pandas.Series:
    return sum(
        (size * source.counters[counter] for counter, size in formula.items()),
        pandas.Series(0, index=source.table.index),
    )
