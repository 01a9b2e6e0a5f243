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
    ],
)
def test_numbers_of_every_locale(tmp_path, written, unit, ns):
    header = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    (tmp_path / "ncu.csv").write_text(
        f'{header}\n"0","9","gemm<a, b>(x)","gpu__time_duration.sum","{unit}","{written}"\n'
    )
    assert list(load_kernels.load(tmp_path / "ncu.csv").table.duration_ns) == [ns]
