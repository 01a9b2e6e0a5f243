"""Peaks from the vendors' data sheets. The peak of a device that is not listed is left out, never
guessed.

Peaks are dense (without structured sparsity), of matrix products that accumulate in fp32, in FLOP/s
by number format. `bandwidth` is in bytes/s and `memory` in bytes. fp32 is without TF32; on AMD it
is that of the matrix cores. A format that the data sheet does not list has no key. Names are those
that PyTorch reports. PyTorch sees each die (GCD) of an MI250 or MI250X as a device, so both have
half of the board's peaks; if it names both, the compute units tell them apart. A partition of an
MI300 (CPX, DPX) has the name of the whole and fewer compute units, and therefore no peak.

Sources:

- H100: https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306
- H200: https://www.nvidia.com/en-us/data-center/h200/
- A100: https://www.nvidia.com/en-us/data-center/a100/
- B200 (HGX, 1000 W): https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
- T4, L4, L40S, A10: https://www.nvidia.com/en-us/data-center/tesla-t4/, l4/, l40s/ and
  products/a10-gpu/. The T4's page says 300 GB/s, but 256 bits at 10 Gbit/s are 320
- RTX 3090, RTX A6000:
  https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf
- RX 7900 XTX:
  https://www.amd.com/en/products/graphics/desktops/radeon/7000-series/amd-radeon-rx-7900xtx.html
- RTX 4090: appendix A of
  https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
- RTX 5090: appendix A of
  https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
- MI210, MI250, MI250X: https://www.amd.com/en/products/accelerators/instinct/mi200.html and the
  pages below it
- MI300X, MI300A, MI325X: https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html,
  mi300a.html, mi325x.html
- MI350X, MI355X: https://www.amd.com/en/products/accelerators/instinct/mi350/mi350x.html,
  mi355x.html, rounded to 0.1 PFLOP/s
"""

import re
from typing import Any


def _peaks(
    bandwidth: float,
    memory: float,
    fp32: float,
    half: float,
    tf32: float | None = None,
    fp8: float | None = None,
):
    """TB/s, GB and TFLOP/s in base units; `half` is of both fp16 and bf16."""
    tera = {
        "fp32": fp32,
        "tf32": tf32,
        "fp16": half,
        "bf16": half,
        "fp8": fp8,
        "bandwidth": bandwidth,
        "memory": memory / 1e3,
    }
    return {key: value * 1e12 for key, value in tera.items() if value is not None}


HOPPER = {"fp32": 67, "tf32": 495, "half": 989, "fp8": 1979}
AMPERE = {"fp32": 19.5, "tf32": 156, "half": 312}
CDNA3 = {"fp32": 163.4, "tf32": 653.7, "half": 1307.4, "fp8": 2614.9}

PEAKS: dict[str, dict[str, float]] = {  # by a regular expression on the device's name
    r"H100 80GB HBM3|H100 SXM": _peaks(3.35, 80, **HOPPER),
    r"H100 PCIe": _peaks(2.0, 80, fp32=51, tf32=378, half=756, fp8=1513),
    r"H100 NVL": _peaks(3.9, 94, fp32=60, tf32=417.5, half=835.5, fp8=1670.5),
    r"NVIDIA H200$|H200 SXM": _peaks(4.8, 141, **HOPPER),
    r"NVIDIA B200$": _peaks(7.7, 180, fp32=75, tf32=1100, half=2250, fp8=4500),
    r"A100-SXM.*80GB": _peaks(2.039, 80, **AMPERE),
    r"A100 80GB PCIe": _peaks(1.935, 80, **AMPERE),
    r"A100-(SXM4|PCIE)-40GB": _peaks(1.555, 40, **AMPERE),
    r"Tesla T4$": {
        key: peak for key, peak in _peaks(0.32, 16, fp32=8.1, half=65).items() if key != "bf16"
    },
    r"NVIDIA L4$": _peaks(0.3, 24, fp32=30.3, tf32=60, half=121, fp8=242.5),
    r"NVIDIA L40S$": _peaks(0.864, 48, fp32=91.6, tf32=183, half=362.05, fp8=733),
    r"NVIDIA A10$": _peaks(0.6, 24, fp32=31.2, tf32=62.5, half=125),
    r"RTX 3090$": _peaks(0.936, 24, fp32=35.6, tf32=35.6, half=71),
    r"RTX A6000$": _peaks(0.768, 48, fp32=38.7, tf32=77.4, half=154.8),
    r"RX 7900 XTX$": _peaks(0.96, 24, fp32=61.4, half=122.8),
    r"RTX 4090$": _peaks(1.008, 24, fp32=82.6, tf32=82.6, half=165.2, fp8=330.3),
    r"RTX 5090$": _peaks(1.792, 32, fp32=104.8, tf32=104.8, half=209.5, fp8=419),
    r"MI210": _peaks(1.6, 64, fp32=45.3, half=181.0),
    r"MI250$": _peaks(1.6, 64, fp32=90.5 / 2, half=362.1 / 2),
    r"MI250X$": _peaks(1.6, 64, fp32=95.7 / 2, half=383.0 / 2),
    r"MI300X": _peaks(5.3, 192, **CDNA3),
    r"MI300A": _peaks(5.3, 128, fp32=122.6, tf32=490.3, half=980.6, fp8=1961.2),
    r"MI325X": _peaks(6.0, 256, **CDNA3),
    r"MI350X": _peaks(8.0, 288, fp32=144.2, half=2300, fp8=4600),
    r"MI355X": _peaks(8.0, 288, fp32=157.3, half=2500, fp8=5000),
}
# Compute units of the whole device, or of a die of an MI250 or MI250X.
COMPUTE_UNITS = {
    "MI210": 104,
    "MI250$": 104,
    "MI250X$": 110,
    "MI300X|MI325X": 304,
    "MI300A": 228,
    "MI35[05]X": 256,
}


def datasheet(name: str, units: int | None = None) -> dict[str, float] | None:
    """The vendor's peaks by number format, `bandwidth` and `memory`, or None for a part of a
    device, or if it is not listed; `units` are the multiprocessors or compute units that PyTorch
    sees, if they are known.
    """
    if "MI250X / MI250" in name:
        name = {104: "MI250", 110: "MI250X"}.get(units or 0, "")
    whole = _of_device(COMPUTE_UNITS, name, units)
    if " MIG " in name or (units and units != whole):
        return None
    return _of_device(PEAKS, name, None)


def _of_device(table: dict[str, Any], name: str, otherwise: Any) -> Any:
    """The entry of the first regular expression that the device's name matches."""
    return next((entry for pattern, entry in table.items() if re.search(pattern, name)), otherwise)


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
