"""The model on paper: what it needs, and how far it goes on."""

from common.studies.scaling import prediction, scaling_results
from tests import records


def test_the_model_needs_the_step_on_one_process_and_a_link():
    without = records.scaling()
    without["cells"] = without["cells"][1:]
    for measured in (records.scaling(link=None), without):
        assert prediction.predict(measured, "weak", "v1", "ddp", 2) is None
        assert scaling_results.model_table(measured, "weak")[1] == []
    assert prediction.extrapolate(without, "strong") == {}


def test_the_model_goes_on_to_thousands_of_gpus():
    header, body = scaling_results.model_table(records.scaling(), "weak")
    assert header == ["GPUs", "v1, ddp: model", "v1, fsdp: model"] and [row[0] for row in body][-1] == 4096
    assert body[0][1:] == ["100.0%", "100.0%"]
    assert [row[0] for row in scaling_results.model_table(records.scaling(), "strong")[1]] == [1, 2, 4]
