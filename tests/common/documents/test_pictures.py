"""Pictures of the documents: what they show, and when they are out of date.

tests/end_to_end/test_documents.py fails when the numbers of a picture in the documents have changed.
"""

import shutil
import xml.etree.ElementTree as ElementTree

from common.analysis.formulas import footprint
from common.config import ModelConfig
from common.documents import pictures, rewrite
from common.errors import UsageError
from common.files import write_json
from tests.conftest import ROOT, texts
from tests.records import benchmark, peers
from tests.small_traces import gpu_trace

import pytest

SHOWN = {marked[3].split()[0]: marked[3] for path in rewrite.documents() for marked in rewrite.MARKED.finditer(path.read_text())}


@pytest.mark.parametrize("name", rewrite.PICTURES)
def test_a_picture_of_the_documents_is_drawn_for_who_can_see_it_and_who_cannot(name):
    (picture,) = rewrite.pictures(f"<!-- picture: {SHOWN[name]} -->\n<!-- /picture -->")
    drawn = picture.drawn()
    assert ElementTree.fromstring(drawn).findtext("{*}title") == picture.description and len(texts(drawn)) > 5


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


def test_a_preset_at_which_version_1_ran_out_of_memory_is_not_in_the_picture_of_memory(tmp_path):
    peers(tmp_path / "peers_medium_bf16.json", v1=20.0)
    cell = {"model": "v1", "batch_size": 8, "sequence_length": 128, "status": "out of memory", "reason": "CUDA", "runs": []}
    write_json(tmp_path / "peers_large_bf16.json", benchmark([cell]))
    assert list(pictures.memory(tmp_path).numbers) == ["medium"]


def test_a_picture_of_memory_needs_medium_or_large(tmp_path):
    shutil.copy(ROOT / "results/h200/peers_small_bf16.json", tmp_path)
    with pytest.raises(UsageError, match="no benchmark of medium or large in bf16"):
        pictures.memory(tmp_path)


def test_a_trace_in_which_nothing_repeats_has_no_layer(tmp_path):
    (tmp_path / "traces").mkdir()
    write_json(tmp_path / "traces/v1_tiny.json", gpu_trace())
    with pytest.raises(UsageError, match="repeats once for each of 4 layers"):
        pictures.layer_kernels(tmp_path / "traces/v1_tiny.json")
