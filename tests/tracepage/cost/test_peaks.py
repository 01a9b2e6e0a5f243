"""Peaks of the devices that PyTorch names, against the vendors' data sheets."""

from tracepage.cost.peaks import datasheet, flops_per_second

import pytest

T = 1e12


@pytest.mark.parametrize(
    "name, bf16, fp8, bandwidth, gigabytes",
    [
        ("NVIDIA H100 80GB HBM3", 989, 1979, 3.35, 80),
        ("NVIDIA H200", 989, 1979, 4.8, 141),
        ("NVIDIA A100-SXM4-80GB", 312, None, 2.039, 80),
        ("NVIDIA GeForce RTX 4090", 165.2, 330.3, 1.008, 24),
        ("AMD Instinct MI250X", 191.5, None, 1.6, 64),
        ("AMD Instinct MI300X", 1307.4, 2614.9, 5.3, 192),
    ],
)
def test_a_listed_device_has_the_data_sheets_peaks(name, bf16, fp8, bandwidth, gigabytes):
    """Of an MI250X, one die of two. Only what has fp8 in hardware has its peak."""
    found = datasheet(name)
    assert [found["bf16"], found["bandwidth"], found["memory"]] == pytest.approx(
        [bf16 * T, bandwidth * T, gigabytes * 1e9]
    )
    assert flops_per_second(name, "bf16", tf32=True) == found["fp16"] == found["bf16"]
    assert flops_per_second(name, "fp8", tf32=False) == (fp8 and pytest.approx(fp8 * T))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA A100-PCIE-80GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GB200",
        "AMD Instinct MI250X / MI250",
        "AMD EPYC 9654",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_a_slice_or_a_device_of_another_name_has_none(name):
    assert datasheet(name) is None and flops_per_second(name, "bf16", tf32=False) is None


@pytest.mark.parametrize(
    "name, units, bf16",
    [
        ("AMD Instinct MI250X / MI250", 104, 181.05),
        ("AMD Instinct MI250X / MI250", 110, 191.5),
        ("AMD Instinct MI300X", 304, 1307.4),
        ("AMD Instinct MI300X", 38, None),
        ("NVIDIA H200", 132, 989),
    ],
)
def test_compute_units_tell_devices_and_their_partitions_apart(name, units, bf16):
    assert flops_per_second(name, "bf16", False, units) == (bf16 and pytest.approx(bf16 * T))


def test_a_format_that_a_device_has_not_has_no_peak():
    assert (
        flops_per_second("Tesla T4", "fp16", False, 40) == 65 * T
        and flops_per_second("Tesla T4", "bf16", False, 40) is None
    )
    assert flops_per_second("NVIDIA H200", "fp32", tf32=True) == 495 * T
    assert flops_per_second("NVIDIA H200", "fp32", tf32=False) == 67 * T
    assert flops_per_second("NVIDIA A100-SXM4-80GB", "fp32", tf32=False) == 19.5 * T
    assert flops_per_second("AMD Instinct MI250X", "fp32", tf32=True) is None
