"""Peaks from the vendors' data sheets. The peak of a device that is not listed is left out, never
guessed.

peaks.csv beside this module has a row for each device, with its source. `device` is a regular
expression for the name that PyTorch reports. Peaks are dense (without structured sparsity), of
matrix products that accumulate in fp32, in TFLOP/s by number format; `bandwidth` is in TB/s and
`memory` in TB. fp32 is without TF32; on AMD it is that of the matrix cores. A format that the data
sheet does not list is empty. PyTorch sees each die (GCD) of an MI250 or MI250X as a device, so both
have half of the board's peaks; if it names both, the compute units tell them apart. A partition of
an MI300 (CPX, DPX) has the name of the whole and fewer compute units, and therefore no peak.
"""

import csv
import functools
import re
from pathlib import Path

KEYS = ("bandwidth", "memory", "fp32", "tf32", "fp16", "bf16", "fp8")


@functools.cache
def datasheet(name: str, units: int | None = None) -> dict[str, float] | None:
    """The vendor's peaks in FLOP/s by number format, `bandwidth` in bytes/s and `memory` in bytes,
    or None for a part of a device, or if it is not listed; `units` are the multiprocessors or
    compute units that PyTorch sees, if they are known.
    """
    if "MI250X / MI250" in name:
        name = {104: "MI250", 110: "MI250X"}.get(units or 0, "")
    if " MIG " in name:
        return None
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if re.search(row["device"], name):
                if units and row["compute_units"] not in ("", str(units)):
                    return None
                return {key: 1e12 * float(row[key]) for key in KEYS if row[key]}
    return None


def flops_per_second(
    name: str, precision: str, tf32: bool, units: int | None = None
) -> float | None:
    """The vendor's peak of matrix products, None if the device or its format is not listed.

    Formats are fp32 (`tf32`: whether TF32 is allowed for it), bf16, fp16 and fp8 (dense, summed in
    fp32; only what has it in hardware).
    """
    if tf32 and precision == "fp32":
        precision = "tf32"
    return (datasheet(name, units) or {}).get(precision)
