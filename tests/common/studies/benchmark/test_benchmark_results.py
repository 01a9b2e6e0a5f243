"""The benchmark's numbers: ratios, ranges and growth."""

from common.studies.benchmark import benchmark_results
from tests import records

import pytest


def test_ratios_are_against_v1_or_else_the_first_model():
    header, rows = benchmark_results.throughput_table(records.benchmark_of_shapes())
    assert header == ["B", "S", "v1", "v2"]
    assert rows[0] == [4, 8, "1,000", "2,000 (2.08x)"] and rows[-1] == [8, 16, "1,000", "out of memory"]
    assert benchmark_results.memory_table(records.benchmark_of_shapes())[1][0] == [4, 8, "800", "600 (1.33x)"]

    _, rows = benchmark_results.throughput_table(records.benchmark_of_shapes(("v2", "hf")))
    assert rows[0] == [4, 8, "2,000", "1,000 (0.50x)"] and rows[-1] == [8, 16, "out of memory", "1,000"]
    assert benchmark_results.reference(records.benchmark_of_shapes(("hf", "v1"))) == "v1"


def test_speedups_have_the_range_of_the_repeats_and_growth_is_along_batch_and_sequence():
    rows = {tuple(row[:3]): row[3:] for row in benchmark_results.step_table(records.benchmark_of_shapes())[1]}
    assert rows["v2", 4, 8] == [pytest.approx(16.0), "14.4 to 17.6", pytest.approx((2.5 + 1 / 0.6) / 2), "1.67 to 2.5"]
    assert rows["v1", 4, 8][2:] == [None, ""] and ("v2", 8, 16) not in rows

    seconds = records.benchmark_of_shapes()
    for cell in seconds["cells"]:
        for run in cell["runs"]:
            run["step_ms"] |= {name: 1e3 * run["step_ms"][name] for name in ("median", "p20", "p80")}
    header, rows = benchmark_results.step_table(seconds)
    assert (header[3], rows[0][3:5]) == ("s/step", [pytest.approx(32.0), "28.8 to 35.2"])

    header, rows = benchmark_results.scaling_table(records.benchmark_of_shapes())
    growth = {tuple(row[:3]): row[3:] for row in rows}
    assert growth["v1", "B 4 to 8", "S 8"] == [2, 2, 1, 1] and growth["v1", "S 8 to 16", "B 4"] == [2, 2, 1, 2]
    assert ("v2", "S 8 to 16", "B 8") not in growth and len(growth) == 4 + 2 and len(header) == 7
