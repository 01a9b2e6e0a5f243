"""Pictures of the documents: what they show, and when they are out of date."""

import json
import xml.etree.ElementTree as ElementTree

from common.documents import pictures, rewrite
from common.errors import UsageError
from tests.records import benchmark

import pytest


def peers(path, **ms: float) -> None:
    cells = [
        {"model": model.replace("_", "-"), "batch_size": 8, "sequence_length": 128, "status": "ok", "reason": None,
         "runs": [{"step_ms": {"median": time, "p20": time, "p80": time, "count": 2}, "peak_mib": 1.0, "kind": "GPU allocator"}]}
        for model, time in ms.items()
    ]  # fmt: skip
    path.write_text(json.dumps(benchmark(cells)))


def test_the_ladder_shows_every_model_and_names_the_fastest(tmp_path):
    peers(tmp_path / "peers_tiny_bf16.json", v1=20.0, v4=0.5, captured_bf16=0.75)
    peers(tmp_path / "peers_small_bf16.json", v1=40.0, v4=1.5)
    peers(tmp_path / "peers_small_fp32.json", v1=50.0)  # of another precision, so not in the picture
    picture = pictures.ladder(tmp_path)
    assert picture.numbers["small, 8 x 128 tokens"] == {"v1": 40.0, "v4": 1.5}
    assert picture.description.endswith("tiny 0.5 ms, small 1.5 ms")
    drawn = picture.drawn()
    shown = {text.text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")}
    assert {"v1", "v4", "captured-bf16", "20", "0.75", "40", "1.5"} <= shown


def test_a_picture_is_out_of_date_when_its_numbers_have_changed(tmp_path):
    file = tmp_path / "ladder.svg"
    peers(tmp_path / "peers_tiny_bf16.json", v1=20.0)
    before = pictures.ladder(tmp_path)
    assert not before.is_current(file)
    file.write_text(before.drawn())
    peers(tmp_path / "peers_tiny_bf16.json", v1=21.0)
    assert before.is_current(file) and not pictures.ladder(tmp_path).is_current(file)


def test_a_document_links_its_picture(tmp_path, monkeypatch):
    """The link is relative to the document's folder."""
    monkeypatch.setattr(rewrite, "ROOT", tmp_path)
    (tmp_path / "gpu").mkdir()
    peers(tmp_path / "gpu" / "peers_tiny_bf16.json", v1=20.0)
    text = rewrite.refreshed("<!-- picture: ladder gpu -->\n<!-- /picture -->\n", tmp_path / "version1")
    assert "](../pictures/ladder-gpu.svg)" in text and rewrite.refreshed(text, tmp_path / "version1") == text
    assert [rewrite.file_of(picture) for picture in rewrite.pictures(text)] == [tmp_path / "pictures" / "ladder-gpu.svg"]


def test_an_unknown_picture_is_refused_and_the_known_ones_are_named():
    with pytest.raises(UsageError, match="no picture is called lader; there are .*ladder"):
        rewrite.refreshed("<!-- picture: lader results -->\n<!-- /picture -->\n")
