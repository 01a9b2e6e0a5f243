"""The report on matrix products: the numbers follow from the times."""

from tests import records, study_options
from tracepage.files import write_json
from tracepage.views.gemm_operations import describe, render_gemms

import pytest

CONFIG = study_options.PEER.model_copy(update={"num_layers": 1, "intermediate_size": 40})


def test_rates_shares_and_bounds_follow_from_the_times():
    measured = records.gemms(CONFIG)
    rows = describe(measured).to_dict("records")
    assert {round(row["tflops"], 9) for row in rows} == {0.25}
    assert {round(row["ceiling_percent"], 6) for row in rows} == {25}
    down = next(
        row
        for row in rows
        if row["gemm"] == "down_proj" and row["phase"] == "forward" and row["batch_size"] == 2
    )
    assert (down["m"], down["n"], down["k"]) == (16, 32, 40)
    intensity = 2 * 16 * 32 * 40 / (4 * (16 * 40 + 40 * 32 + 16 * 32))  # FLOP/byte
    assert down["intensity"] == pytest.approx(intensity)
    # the ceilings meet at 1e12 / 1e11 = 10 FLOP/byte
    assert intensity < 10 and down["limit"] == "memory"
    for changed, limit in (
        ({"operation_seconds": 1.0}, "launch"),
        ({"bytes_per_second": 1e15}, "compute"),
    ):
        ceilings = measured["ceilings"] | {"operation_seconds": 0.0} | changed
        assert set(describe(measured | {"ceilings": ceilings})["limit"]) == {limit}


def test_the_report_has_the_products_of_the_last_point_and_names_doubts(tmp_path):
    measured = records.gemms(CONFIG)
    for row in measured["gemms"]:
        row["ms"]["p80"] = 2 * row["ms"]["p20"]
    write_json(tmp_path / "gemm_analysis.json", measured)
    said = render_gemms(tmp_path / "gemm_analysis.json").terminal()
    assert ["down_proj", "forward", "32", "32", "40"] in [
        line.split()[:5] for line in said.splitlines()
    ]
    assert (
        "A GPU" in said
        and "1 TFLOP/s" in said
        and "more than 30 % of the median" in " ".join(said.split())
    )
