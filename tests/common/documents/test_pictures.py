"""Pictures of the documents: what they show, and when they are out of date."""

import json
from pathlib import Path

from common.analysis.formulas import footprint
from common.config import ModelConfig
from common.documents import pictures, rewrite
from common.errors import UsageError
from tests.conftest import ROOT, texts
from tests.records import peers, scaling
from tests.small_traces import event

import pytest


def test_the_ladder_shows_every_model_and_names_the_fastest(tmp_path):
    peers(tmp_path / "peers_tiny_bf16.json", v1=20.0, v4=0.5, captured_bf16=0.75)
    peers(tmp_path / "peers_small_bf16.json", v1=40.0, v4=1.5)
    peers(tmp_path / "captured_small_bf16.json", v1=20.0, v1_captured=10.0, v2_captured=5.0)  # more processes of v1
    peers(tmp_path / "peers_small_fp32.json", v1=50.0)  # of another precision, so not in the picture
    picture = pictures.ladder(tmp_path)
    tiny, small = picture.numbers.values()
    assert list(picture.numbers) == ["tiny, bf16, 8 x 128", "small, bf16, 8 x 128"] and tiny["v4"] == (40.0, 40.0, 40.0)
    assert small == {"v1": (1.0, 0.5, 2.0), "v1-captured": (3.0, 2.0, 4.0), "v4": (20.0, 20 / 1.5, 40 / 1.5)}
    assert picture.description.endswith("tiny: v4 40x (40 to 40), small: v4 20x (13.3 to 26.7)")
    assert {"v1", "v4", "captured-bf16", "v1-captured", "40x", "3x", "20x"} <= texts(picture.drawn())


def test_every_version_has_a_colour_and_every_peer_is_grey():
    versions = [pictures.colour(f"v{number}") for number in range(1, 6)]
    assert len(set(versions)) == 5 and pictures.colour("v2-compile") == versions[1]
    assert pictures.colour("v12") and pictures.colour("captured-bf16") == pictures.colour("liger") == "0.7"


def test_a_picture_is_out_of_date_when_its_numbers_have_changed(tmp_path):
    file = tmp_path / "ladder.svg"
    peers(tmp_path / "peers_tiny_bf16.json", v1=20.0, v4=1.0)
    before = pictures.ladder(tmp_path)
    assert not before.is_current(file)
    file.write_text(before.drawn())
    peers(tmp_path / "peers_tiny_bf16.json", v1=21.0, v4=1.0)
    assert before.is_current(file) and not pictures.ladder(tmp_path).is_current(file)


def test_a_document_links_its_picture(tmp_path, monkeypatch):
    """The link is relative to the document's folder."""
    monkeypatch.setattr(rewrite, "ROOT", tmp_path)
    (tmp_path / "gpu").mkdir()
    peers(tmp_path / "gpu" / "peers_tiny_bf16.json", v1=20.0)
    text = rewrite.refreshed("<!-- picture: ladder gpu -->\n<!-- /picture -->\n", tmp_path / "version1")
    assert "](../pictures/ladder-gpu.svg)" in text and rewrite.refreshed(text, tmp_path / "version1") == text
    assert [rewrite.file_of(picture) for picture in rewrite.pictures(text)] == [tmp_path / "pictures" / "ladder-gpu.svg"]


def test_memory_over_a_step_agrees_with_the_formulas_of_its_two_highest_moments():
    """The end of the forward pass has all activations and no gradients, the end of the backward pass the opposite."""
    config, shape = ModelConfig(num_layers=3), (8, 128)
    areas, kept = pictures.held(config, *shape), footprint.activations(config, *shape, "cuda")
    totals = [sum(sizes) for sizes in zip(*areas.values(), strict=True)]
    stays = footprint.states(config)
    assert len(totals) == 2 * (3 + 2) + 2
    assert totals[0] == stays["weights"] + stays["adamw"] == pytest.approx(totals[-1])
    assert totals[5] == pytest.approx(stays["weights"] + stays["adamw"] + kept["total"])
    assert totals[10] == pytest.approx(stays["total"])
    assert max(totals) >= footprint.least_peak(config, *shape, "cuda") * (1 - 1e-9)
    assert areas["scores [B, H, S, S]"][5] == pytest.approx(kept["scores"])


def test_the_picture_of_memory_has_the_measured_peak_of_the_first_model(tmp_path):
    peers(tmp_path / "peers_medium_bf16.json", v1=20.0, v4=0.5)
    picture = pictures.memory(tmp_path)
    assert picture.numbers["medium"]["model"] == "v1" and picture.numbers["medium"]["peak"] == 1 / 1024
    assert {"measured peak", "gradients", "medium, 8 x 128 tokens"} <= texts(picture.drawn())
    assert "Memory over one training step of v1 in bf16, by formula" in picture.description


def kernel_trace(path: Path, *layers: list[str]) -> Path:
    """One step on a GPU: an embedding, the kernels of each layer, and an optimizer's; they take 2.0, 2.01, 2.02, ... us."""
    names = ["gather_kernel", *sum(layers, []), *["multi_tensor_apply"] * 2 * len(layers)]
    events = [event("user_annotation", "ProfilerStep#0", 0, 1000)]
    for i, name in enumerate(names):
        events += [
            event("cpu_op", "aten::op", 3 * i, 3 * i + 2),
            event("cuda_runtime", "cudaLaunchKernel", 3 * i, 3 * i + 1, correlation=i),
            event("kernel", name, 500 + 3 * i, 502 + 3.01 * i, 0, stream=7, correlation=i),
        ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_kernels_of_a_layer_are_those_that_repeat_once_for_each_layer(tmp_path):
    """The second layer is taken. The optimizer's kernels repeat as well, but none of them is a matrix product."""
    layer = ["rms_norm_kernel", "nvjet_a", "silu_elementwise", "nvjet_b"]
    picture = pictures.layer_kernels(
        kernel_trace(tmp_path / "traces" / "v1_tiny.json", *[layer] * 4),
        kernel_trace(tmp_path / "traces" / "v4_tiny.json", *[["nvjet"]] * 4),
    )
    kinds = ["reductions", "matrix products", "elementwise", "matrix products"]
    assert picture.numbers["v1"]["layer"] == list(zip(kinds, (2.05, 2.06, 2.07, 2.08), strict=True))
    assert picture.numbers["v1"]["step"] == {"matrix products": 8, "reductions": 4, "elementwise": 12, "copies": 1}
    assert picture.description.endswith(
        "v1: 4 in a layer's forward pass, 25 with copies in a step; v4: 1 in a layer's forward pass, 13 with copies in a step"
    )
    assert {"v1", "v4", " 4 kernels", " 25", "elementwise"} <= texts(picture.drawn())


def test_the_kernels_of_a_compiled_layer_are_found_though_their_names_differ(tmp_path):
    layers = [[f"triton_per_fused_add_mean_rsqrt_{i}", "nvjet_a", f"triton_poi_fused_silu_{i}", "nvjet_b"] for i in range(4)]
    picture = pictures.layer_kernels(kernel_trace(tmp_path / "traces" / "v2_compile_tiny.json", *layers))
    assert [kind for kind, _ in picture.numbers["v2, compiled"]["layer"]] == [
        "reductions", "matrix products", "elementwise", "matrix products",
    ]  # fmt: skip
    assert "v2, compiled" in texts(picture.drawn())


def test_a_trace_in_which_nothing_repeats_or_without_kernels_has_no_layer(tmp_path):
    path = kernel_trace(tmp_path / "traces" / "v1_tiny.json", *[["nvjet"]] * 3)
    with pytest.raises(UsageError, match="repeats once for each of 4 layers"):
        pictures.layer_kernels(path)
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["cat"] != "kernel"]
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(UsageError, match="v1_tiny.json has no kernels of a GPU"):
        pictures.layer_kernels(path)


def test_fusions_are_switched_on_one_after_another():
    picture = pictures.fusions(ROOT / "results/h200/v2_ablation_tiny_fp32.json")
    assert [row[0] for row in picture.numbers] == ["none", "+ QKV", "+ flash", "+ SwiGLU", "+ compile"]
    assert [row[1] for row in picture.numbers] == [546, 510, 446, 422, 177]
    assert {"+ compile", "177", "8.59"} <= texts(picture.drawn())


def test_rates_of_kernels_are_those_of_the_largest_shape():
    picture = pictures.kernel_rates(ROOT / "results/h200/kernels_memory.json")
    assert list(picture.numbers) == ["rms_norm", "add_rms_norm", "apply_rope", "swiglu"]
    assert list(picture.numbers["swiglu"])[-1] == "kernel"
    assert picture.numbers["rms_norm"]["kernel"] == 94.1  # as the table of version3_triton/README.md shows it
    assert "4 x 8192 tokens, D = 4,096" in picture.description


def test_the_spans_of_a_step_add_up_to_its_time():
    picture = pictures.step_spans(ROOT / "results/cpu", ROOT / "results/h100")
    assert len(picture.numbers) == 5
    assert all(sum(shares.values()) == pytest.approx(100, abs=0.5) for shares in picture.numbers.values())
    tiny = picture.numbers["tiny, NVIDIA H100 80GB HBM3"]
    assert (tiny["attention"], tiny[pictures.IDLE]) == (3.7, 92.1)  # as the table of version1_pytorch_baseline/README.md has them
    assert {"attention", "92", pictures.IDLE} <= texts(picture.drawn())


def test_the_efficiency_on_several_gpus_is_that_of_weak_scaling(tmp_path):
    path = tmp_path / "scaling_large_bf16.json"
    path.write_text(json.dumps(scaling()))
    picture = pictures.scaling_efficiency(tmp_path)
    assert picture.numbers == {"large, bf16": {"v1, ddp": {1: 100.0, 2: 80.0}}}
    assert "large, bf16: v1, ddp 80% on 2" in picture.description and "efficiency, %" in picture.drawn()
