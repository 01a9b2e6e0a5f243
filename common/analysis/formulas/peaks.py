"""Peaks from the vendors' data sheets. The peak of a device that is not listed is measured or left out, never guessed."""

import re

# Dense peaks in FLOP/s and bytes/s, by a regular expression on the device's name, from the vendors' data sheets.
# "fp32" is without TF32. A device that is not listed gets no percentage of peak; --measure-peak measures its peak.
PEAKS: dict[str, dict[str, float]] = {
    r"H100 80GB HBM3|H100 SXM": {"fp32": 67e12, "tf32": 495e12, "fp16": 989e12, "bf16": 989e12, "bandwidth": 3.35e12},
    r"NVIDIA H200$|H200 SXM": {"fp32": 67e12, "tf32": 495e12, "fp16": 989e12, "bf16": 989e12, "bandwidth": 4.8e12},
    r"A100-SXM.*80GB": {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12, "bandwidth": 2.039e12},
    r"MI300X": {"fp32": 163.4e12, "tf32": 653.7e12, "fp16": 1307.4e12, "bf16": 1307.4e12, "bandwidth": 5.3e12},
    r"MI300A": {"fp32": 122.6e12, "tf32": 490.3e12, "fp16": 980.6e12, "bf16": 980.6e12, "bandwidth": 5.3e12},
}


def datasheet(name: str) -> dict[str, float] | None:
    """The vendor's peaks for a device's name (FLOP/s by precision, `bandwidth` in bytes/s), or None if it is not listed."""
    if " MIG " in name:  # a slice of the device
        return None
    return next((peaks for pattern, peaks in PEAKS.items() if re.search(pattern, name)), None)
