"""Markers in a document, and the command that rewrites what stands between them."""

import sys

from documents import rewrite, rows
from tests.records import peers
from tracepage.errors import RunError

import pytest


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one page, in which a picture is shown, and its measurement."""
    for module in (rewrite, rows):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in ("gpu", "pictures", "pages"):
        (tmp_path / name).mkdir()
    peers(tmp_path / "gpu" / "versions_tiny_bf16.json", v1=20.0, v4=1.0)
    page = tmp_path / "pages" / "page.md"
    picture = "<!-- picture: ladder gpu/versions_*.json -->\nold\n<!-- /picture -->"
    page.write_text(
        f"Before\n{picture}\nAfter\n<!-- table: formula_tables.presets -->\n<!-- /table -->\n"
    )
    monkeypatch.setattr(rewrite, "documents", lambda: [page])
    rewrite.draw_picture.cache_clear()
    yield page
    rewrite.draw_picture.cache_clear()


def test_a_check_changes_nothing_and_fails_until_the_documents_are_rewritten(
    repository, monkeypatch, capsys
):
    before = repository.read_text()
    monkeypatch.setattr(sys, "argv", ["documents", "--check"])
    with pytest.raises(RunError, match="run python -m documents"):
        rewrite.main()
    assert (
        capsys.readouterr().out
        == "out of date: pages/page.md\nout of date: pictures/ladder-gpu.svg\n"
    )
    assert (
        repository.read_text() == before
        and not (repository.parents[1] / "pictures/ladder-gpu.svg").exists()
    )

    monkeypatch.setattr(sys, "argv", ["documents"])
    rewrite.main()
    monkeypatch.setattr(sys, "argv", ["documents", "--check"])
    rewrite.main()
    text = repository.read_text()
    assert (
        text.startswith("Before\n<!-- picture: ladder gpu/versions_*.json -->\n\n![Speed-up of all")
        and "After" in text
    )
    assert (
        "](../pictures/ladder-gpu.svg)\n\n<!-- /picture -->" in text
        and "| tiny | 8 | 128 |" in text
    )
