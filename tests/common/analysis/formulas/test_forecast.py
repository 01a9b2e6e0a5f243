"""The forecast of a step against counts by hand and recorded runs."""

from common.analysis.comparisons import ablation_effects
from common.analysis.formulas import forecast
from common.analysis.formulas.peaks import datasheet
from common.config import PRESETS, ModelConfig
from common.documents import pictures
from common.documents.architecture import preset
from common.files import read_json
from tests.conftest import ROOT

import pytest

H200 = ROOT / "results/h200"


def test_versions_1_and_4_of_one_layer_by_hand():
    """B 2, S 3, D 4, H 2, K 2, F 8, V 5, and elements of 2 bytes: t 6, n 24, f 48, p 36."""
    config = ModelConfig(
        hidden_size=4, num_attention_heads=2, num_key_value_heads=2, intermediate_size=8, vocab_size=5, num_layers=1
    )
    parameters = 5 * 4 + 4 * 16 + 3 * 32 + 3 * 4
    linear = 24 * 2 * (5 + 4 * 4 + 3 * 8)  # FLOPs of the forward products: D to V, to 4 D and to 3 F
    products = 3 * 2 * ((24 + 16 + 24) + (48 + 32 + 24) + (24 + 20 + 30))  # output, down and head, once forward, twice backward
    flops, moved, kernels = forecast.work(config, 2, 3, version=1)
    assert flops == 3 * (linear + 4 * 4 * 2 * 9)
    assert kernels == (45 + 72) + 3 + 7 + 8
    changes = sum(change.bytes[0] for change in forecast.layer_changes(config, 2, 3)) // 2
    assert moved == changes + products + 36 * 30 + 80 * parameters + 12 * (parameters - 12)
    flops, moved, kernels = forecast.work(config, 2, 3, version=4)
    assert flops == 3 * (linear + 4 * 4 * 2 * 6)
    assert kernels == 7 + 12 + 3 + 1 + 1  # two norms, attention and four products; two norms, attention, SwiGLU, eight products
    joined = 3 * 2 * ((24 + 48 + 72) + (24 + 64 + 96))  # Q, K, V in one, and gate and up
    attention, swiglu, norms = (
        2 * ((2 + 2) * 24 + 12) + 2 * (8 * 24 + 12), 2 * 5 * 48, 2 * 2 * (4 * 24 + 6 + 4) + 2 * 2 * (4 * 24 + 6 + 8),
    )  # fmt: skip
    assert moved == products + joined + attention + swiglu + norms + 2 * 2 * 30 + 28 * parameters


@pytest.mark.parametrize("preset_name", ["tiny", "small", "medium"])
def test_kernels_of_versions_1_and_2_are_most_of_those_that_ran(preset_name):
    combinations = ablation_effects.read(H200 / f"v2_ablation_{preset_name}_bf16.json")["combinations"]
    ran = {tuple(each["fusions"].values()): each["launches_per_step"] for each in combinations}
    for version, fusions in ((1, (False, False, False, False)), (2, (True, True, True, False))):
        *_, kernels = forecast.work(*preset(preset_name), version)
        assert 0.7 * ran[fusions] < kernels <= ran[fusions]


@pytest.mark.parametrize("version", [3, 4])
def test_kernels_of_versions_3_and_4_are_most_of_those_in_the_trace(version):
    _, ran = pictures.gpu_trace(H200 / f"traces/v{version}_small.json.gz")
    *_, kernels = forecast.work(*preset("small"), version)
    assert 0.5 * len(ran) / ran.step.nunique() < kernels <= len(ran) / ran.step.nunique()


@pytest.mark.parametrize("name", PRESETS)
def test_each_version_needs_less_than_the_one_before(name):
    works = [forecast.work(*preset(name), version) for version in (1, 2, 3, 4)]
    for before, after in zip(works, works[1:], strict=False):
        assert all(less <= more for less, more in zip(after, before, strict=True)) and after[1:] < before[1:]
    assert works[0][0] > works[1][0] == works[2][0] == works[3][0]


def test_bounds_are_the_work_over_the_data_sheet_and_the_least_recorded_launch():
    seconds = [
        run["ceilings"]["operation_seconds"]
        for path in (ROOT / "results").glob("h[12]00/*.json")
        if (run := read_json(path)).get("ceilings")
    ]
    assert min(seconds) == pytest.approx(forecast.LAUNCH, rel=0.02) and max(seconds) < 12e-6
    peaks = datasheet("MI300X")
    flops, moved, kernels = forecast.work(*preset("medium"), 1)
    assert forecast.forecast(*preset("medium"), 1, peaks) == (flops / 1307.4e12, moved / 5.3e12, kernels * forecast.LAUNCH)
