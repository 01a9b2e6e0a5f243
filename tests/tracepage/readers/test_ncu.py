"""Both forms of ncu's CSV: the same launches, and counters in base units."""

from tests.kernel_files import FIXTURES
from tracepage.readers import load_kernels, ncu
from tracepage.views import launches

import pytest

FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)"


def test_both_pages_of_ncu_give_the_same_launches_and_counters_in_base_units():
    details, raw = (
        load_kernels.load(FIXTURES / "ncu_details.csv"),
        load_kernels.load(FIXTURES / "ncu_raw.csv"),
    )
    for found in (details, raw):
        assert ncu.CLOCK_NOTE in found.notes
        assert found.kind == "ncu" and list(found.table.name) == [
            FILL,
            "gemm_kernel",
            "gemm_kernel",
        ]
        assert list(found.table.duration_ns) == pytest.approx([2240, 1_500_000, 1_234_560])
        assert found.table.start_ns.isna().all() and launches.gaps(found) is None

    details, raw = (
        load_kernels.load(FIXTURES / f"ncu_{page}.csv").counters for page in ("details", "raw")
    )
    assert list(raw) == [
        "dram__bytes.sum",
        "gpu__time_duration.sum",
        "launch__registers_per_thread",
        "lts__t_sectors.sum",
    ]
    assert (
        list(raw["dram__bytes.sum"][:2]) == pytest.approx([2.1e6, 1.0245e9])
        and raw["dram__bytes.sum"].isna()[2]
    )
    assert list(raw["lts__t_sectors.sum"]) == [65536, 8192, 8192]
    first = details.loc[0].dropna().to_dict()
    assert first == pytest.approx(
        {
            "DRAM Frequency (hz)": 2.61e9,
            "Duration (ns)": 2240,
            "Memory Throughput (%)": 41.5,
            "Memory Throughput (byte/s)": 936.2e9,
        }
    )
    assert details["Elapsed Cycles (cycle)"][1] == 1_234_567


@pytest.mark.parametrize(
    ("written", "unit", "ns"),
    [
        ("1.234,56", "us", 1_234_560),
        ("1.234.567", "ns", 1_234_567),
        ("2,24", "us", 2240),
        ("1,234.56", "us", 1_234_560),
        ("0,125", "us", 125),
        ("1 048 576", "ns", 1_048_576),
        ("1 234,567", "us", 1_234_567),
        ("1'234.567", "us", 1_234_567),
        ("1\u2019234\u2019567", "ns", 1_234_567),
        ("1\u202f234,567", "us", 1_234_567),
        ("1\u00a0234 (1\u00a0234; 5)", "ns", 1234),
        ("2.5", "msecond", 2_500_000),
        ("2.5", "ms", 2_500_000),
        ("2.5", "second", 2_500_000_000),
        ("2.5", "usecond", 2500),
        ("25", "nsecond", 25),
    ],
)
def test_numbers_of_every_locale_and_unit(tmp_path, written, unit, ns):
    header = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    text = f'{header}\n"0","9","gemm<a, b>(x)","gpu__time_duration.sum","{unit}","{written}"\n'
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):  # A shell of Windows redirects as UTF-16.
        (tmp_path / "ncu.csv").write_text(text, encoding=encoding)
        assert list(load_kernels.load(tmp_path / "ncu.csv").table.duration_ns) == [ns]


def test_grouped_counters_stand_beside_short_ones(tmp_path):
    header = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    rows = [
        f'"{launch}","9","copy","{metric}","{unit}","{value}"'
        for launch, read in enumerate(("512", "1 048 576", "12,5"))
        for metric, unit, value in (
            ("gpu__time_duration.sum", "ns", "900"),
            ("dram__bytes_read.sum", "byte", read),
        )
    ]
    (tmp_path / "ncu.csv").write_text("\n".join([header, *rows]))
    counters = load_kernels.load(tmp_path / "ncu.csv").counters
    assert list(counters["dram__bytes_read.sum"]) == [512, 1_048_576, 12.5]
