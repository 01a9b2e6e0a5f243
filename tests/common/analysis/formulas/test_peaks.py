"""Peaks of the devices that PyTorch names, against the vendors' data sheets."""

from common.analysis.formulas.peaks import PEAKS, datasheet, flops_per_second

import pytest

T = 1e12


@pytest.mark.parametrize(
    "name, bf16, bandwidth, gigabytes",
    [
        ("NVIDIA H100 80GB HBM3", 989, 3.35, 80), ("NVIDIA H100 PCIe", 756, 2.0, 80),
        ("NVIDIA H200", 989, 4.8, 141), ("NVIDIA B200", 2250, 7.7, 180),
        ("NVIDIA A100-SXM4-80GB", 312, 2.039, 80), ("NVIDIA A100 80GB PCIe", 312, 1.935, 80),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555, 40), ("NVIDIA A100-PCIE-40GB", 312, 1.555, 40),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.008, 24), ("NVIDIA GeForce RTX 5090", 209.5, 1.792, 32),
        ("AMD Instinct MI210", 181.0, 1.6, 64), ("AMD Instinct MI250", 181.05, 1.6, 64),
        ("AMD Instinct MI250X", 191.5, 1.6, 64), ("AMD Instinct MI300X", 1307.4, 5.3, 192),
        ("AMD Instinct MI300A", 980.6, 5.3, 128), ("AMD Instinct MI325X", 1307.4, 6.0, 256),
        ("AMD Instinct MI350X", 2300, 8.0, 288), ("AMD Instinct MI355X", 2500, 8.0, 288),
    ],
)  # fmt: skip
def test_a_listed_device_has_the_data_sheets_peaks(name, bf16, bandwidth, gigabytes):
    """Of an MI250 or MI250X, one die of two."""
    found = datasheet(name)
    assert [found["bf16"], found["bandwidth"], found["memory"]] == pytest.approx([bf16 * T, bandwidth * T, gigabytes * 1e9])
    assert flops_per_second(name, "bf16", tf32=True) == found["fp16"] == found["bf16"]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-80GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 D", "NVIDIA GB200",
        "AMD Instinct MI250X / MI250", "AMD EPYC 9654",
    ],
)  # fmt: skip
def test_a_slice_or_a_device_of_another_name_has_none(name):
    assert datasheet(name) is None and flops_per_second(name, "bf16", tf32=False) is None


def test_each_device_has_one_entry_and_faster_formats_are_not_slower():
    for pattern, peaks in PEAKS.items():
        rates = [peaks[key] for key in ("fp32", "tf32", "bf16", "fp8") if key in peaks]
        assert rates == sorted(rates), pattern
        assert 1e12 < peaks["bandwidth"] < 1e13 and 2e10 < peaks["memory"] < 3e11, pattern


def test_tf32_counts_only_where_the_device_has_it():
    assert flops_per_second("NVIDIA H200", "fp32", tf32=True) == 495 * T
    assert flops_per_second("NVIDIA H200", "fp32", tf32=False) == 67 * T
    assert flops_per_second("AMD Instinct MI250X", "fp32", tf32=True) is None
