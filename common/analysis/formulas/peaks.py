"""Peaks from the vendors' data sheets. The peak of a device that is not listed is left out, never guessed.

Peaks are dense (without structured sparsity), of matrix products that accumulate in fp32, in FLOP/s by number format.
`bandwidth` is in bytes/s and `memory` in bytes. fp32 is without TF32; on AMD it is that of the matrix cores. A format that the
data sheet does not list has no key. Names are those that PyTorch reports. PyTorch sees each die (GCD) of an MI250 or MI250X as a
device, so both have half of the board's peaks. "AMD Instinct MI250X / MI250" may be either of the two, so it has no peak.

Sources:

- H100: https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306
- H200: https://www.nvidia.com/en-us/data-center/h200/
- A100: https://www.nvidia.com/en-us/data-center/a100/
- B200 (HGX, 1000 W): https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
- RTX 4090: appendix A of https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
- RTX 5090: appendix A of https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
- MI210, MI250, MI250X: https://www.amd.com/en/products/accelerators/instinct/mi200.html and the pages below it
- MI300X, MI300A, MI325X: https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html, mi300a.html, mi325x.html
- MI350X, MI355X: https://www.amd.com/en/products/accelerators/instinct/mi350/mi350x.html, mi355x.html
"""

import re


def _peaks(bandwidth: float, memory: float, fp32: float, half: float, tf32: float | None = None, fp8: float | None = None):
    """TB/s, GB and TFLOP/s in base units; `half` is of both fp16 and bf16."""
    tera = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half, "fp8": fp8, "bandwidth": bandwidth, "memory": memory / 1e3}
    return {key: value * 1e12 for key, value in tera.items() if value is not None}


HOPPER = {"fp32": 67, "tf32": 495, "half": 989, "fp8": 1979}
AMPERE = {"fp32": 19.5, "tf32": 156, "half": 312}
CDNA3 = {"fp32": 163.4, "tf32": 653.7, "half": 1307.4, "fp8": 2614.9}

PEAKS: dict[str, dict[str, float]] = {  # by a regular expression on the device's name
    r"H100 80GB HBM3|H100 SXM": _peaks(3.35, 80, **HOPPER),
    r"H100 PCIe": _peaks(2.0, 80, fp32=51, tf32=378, half=756, fp8=1513),
    r"NVIDIA H200$|H200 SXM": _peaks(4.8, 141, **HOPPER),
    r"NVIDIA B200$": _peaks(7.7, 180, fp32=75, tf32=1100, half=2250, fp8=4500),
    r"A100-SXM.*80GB": _peaks(2.039, 80, **AMPERE),
    r"A100 80GB PCIe": _peaks(1.935, 80, **AMPERE),
    r"A100-(SXM4|PCIE)-40GB": _peaks(1.555, 40, **AMPERE),
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


def datasheet(name: str) -> dict[str, float] | None:
    """The vendor's peaks for a device's name, by number format, `bandwidth` and `memory`, or None if it is not listed."""
    if " MIG " in name or "MI250X / MI250" in name:  # a slice of the device; one of two devices
        return None
    return next((peaks for pattern, peaks in PEAKS.items() if re.search(pattern, name)), None)


def flops_per_second(name: str, precision: str, tf32: bool) -> float | None:
    """The vendor's peak of matrix products, None if the device or its format is not listed.

    Args:
        precision: fp32, bf16 or fp16.
        tf32: whether TF32 is allowed for fp32.
    """
    return (datasheet(name) or {}).get("tf32" if tf32 and precision == "fp32" else precision)
