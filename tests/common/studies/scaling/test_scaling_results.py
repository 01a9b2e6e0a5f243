"""The scaling study's numbers: efficiencies, the model beside them, what it needs, and how far it goes on."""

from common.studies.scaling import scaling_results
from tests import records

import pytest


def rows_of(measured: dict) -> dict[tuple, dict]:
    return {(row["scaling"], row["parallel"], row["processes"]): row for row in scaling_results.results(measured)}


def test_efficiency_and_the_model_beside_it():
    """One process takes 8 ms. The model: 4 kB over 1 GB/s take 0.004 ms, all exposed, which is all that comes to 8 ms (weak)."""
    rows = rows_of(records.scaling())
    weak, strong = rows["weak", "ddp", 2], rows["strong", "ddp", 2]
    assert (weak["ms"], weak["efficiency"], weak["tokens_per_second"]) == pytest.approx((10, 0.8, 2 * 4 * 128 / 0.010))
    assert strong["efficiency"] == pytest.approx(8 / (2 * 5)) and rows["weak", None, 1]["efficiency"] == 1
    assert (weak["model_ms"], weak["model_error"]) == pytest.approx((8.004, -0.1996))
    assert strong["model_ms"] == pytest.approx(3 + 2 + 0.004)  # the update does not shrink with the batch
    assert (weak["exposed_ms"], weak["exposed_waiting_ms"]) == (4, 1.5) and strong["exposed_ms"] is None
    assert rows["weak", "fsdp", 2]["ms"] is None and rows["weak", "fsdp", 2]["model_ms"] > 0  # predicted, not measured


def test_nvlink_multicast_is_off_or_left_to_nccl():
    (unset,) = scaling_results.multicast(records.scaling(variables={}))
    (on,) = scaling_results.multicast(records.scaling(variables={"NCCL_NVLS_ENABLE": "1"}))
    assert "was not set: NCCL decides" in unset and "left to NCCL (NCCL_NVLS_ENABLE=1)" in on


def test_the_model_needs_the_step_on_one_process_and_a_link_and_goes_on_to_thousands_of_gpus():
    without = records.scaling()
    without["cells"] = without["cells"][1:]
    for measured in (records.scaling(link=None), without):
        assert scaling_results.predict(measured, "weak", "v1", "ddp", 2) is None
        assert scaling_results.model_table(measured, "weak")[1] == []
        header, _ = scaling_results.step_table(scaling_results.results(measured))
        assert not {"on paper, ms", "its error"} & {*header} and "ms/step" in header
    assert scaling_results.extrapolate(without, "strong") == {} and rows_of(without)["weak", "ddp", 2]["efficiency"] is None

    header, body = scaling_results.model_table(records.scaling(), "weak")
    assert header == ["GPUs", "v1, ddp: model", "v1, fsdp: model"] and [row[0] for row in body][-1] == 4096
    assert body[0][1:] == ["100.0%", "100.0%"]
    assert [row[0] for row in scaling_results.model_table(records.scaling(), "strong")[1]] == [1, 2, 4]
