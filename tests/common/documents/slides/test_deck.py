"""The slides: one file with everything in it, and short texts."""

import base64
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from common.documents import rewrite
from common.documents.slides import deck
from common.errors import UsageError
from tests.conftest import ROOT

import pytest

TEXT = deck.SOURCE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """What the command writes."""
    path = tmp_path_factory.mktemp("slides") / "new.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["deck", "--output", str(path)])
        deck.main()
    return path.read_text(encoding="utf-8")


def test_every_slide_has_one_title_and_the_deck_fits_half_a_day(page):
    titles = [re.findall("<h[12][^>]*>(.+?)</h[12]>", section) for section in page.split("<section ")[1:]]
    assert all(len(title) == 1 for title in titles) and len({title[0] for title in titles}) == len(titles)
    assert 25 <= len(titles) <= 32


def test_all_pictures_and_tables_of_the_source_are_in_the_page(page):
    kinds = [match[2] for match in rewrite.MARKED.finditer(TEXT)]
    images = re.findall("<img ([^>]*)>", page)
    tables = kinds.count("table") + kinds.count("section")
    drawn = re.findall(r"^!\[[^]]+\]\(\.\./pictures/", TEXT, re.MULTILINE)  # those between markers, and those drawn by hand
    assert len(images) == len(drawn) > kinds.count("picture") > 5 and page.count("<table") == tables > 1
    assert all(table.count("<tr>") <= 1 + 6 for table in page.split("<table")[1:])
    for image in images:
        content = base64.b64decode(re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', image)[1]).decode()
        assert ElementTree.fromstring(content).tag.endswith("svg") and re.search('alt="[^"]', image)
        width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', content).groups())
        scale = min(0.94 * 1920 / width, 0.8 * 1080 / height)  # as slides.html shows it
        letters = re.findall(r'(?:font: |font-size[:=] ?"?)([\d.]+)', content)
        assert min(map(float, letters)) * scale >= 24, image[:100]  # 18 points


def test_the_page_refers_to_nothing_outside_of_it(page):
    targets = re.findall(r"""\s(?:src|href|srcset|data|action)=["']?([^"'\s>]*)""", page)
    assert targets and all(target.startswith("data:") for target in targets)
    assert not re.search(r"url\(|@import|\bimport\b|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_exercises_on_slides_exist():
    named = 0
    for title, text in zip(*[iter(deck.TITLE.split(TEXT)[1:])] * 2, strict=True):
        problems = re.findall(r"^- Problem \((\w+)\)$", text, re.MULTILINE)
        named += len(problems)
        for path in re.findall(r"`(version[\w/]+(?:\.md)?)`", text):
            exercise = ROOT / path
            assert exercise.exists(), f"{title}: {path}"
            headings = re.findall(r"^## Problem \((\w+)\)", exercise.read_text(), re.MULTILINE) if problems else []
            assert set(problems) <= set(headings), title
    assert named > 3


def write(folder: Path, text: str) -> Path:
    path = folder / "slides.md"
    path.write_text(text)
    return path


def test_words_of_tables_and_notes_do_not_count_and_a_slide_with_too_many_is_named(tmp_path):
    table = "<!-- table: presets -->\n\n| a b c | d |\n| --- | --- |\n| e f | g |\n\n<!-- /table -->\n"
    found = deck.slides(write(tmp_path, f"# One\n\n- two **three**\n\nNote: `four` five.\n## Six\n\n{table}\nseven\n"))
    assert [(slide.title, slide.words) for slide in found] == [("One", 2), ("Six", 1)]
    assert found[0].notes == "<p><code>four</code> five.</p>" and "<strong>three</strong>" in found[0].body
    assert "four" not in found[0].body and found[1].body.count("<figure>") == 1 and "<td>e f</td>" in found[1].body

    source = write(tmp_path, "# One\n\nshort\n\n## Two & three\n\n" + "word " * (deck.MOST_WORDS + 1))
    with pytest.raises(UsageError, match=f"slide 2, Two &amp; three, has {deck.MOST_WORDS + 1} words; at most {deck.MOST_WORDS}"):
        deck.slides(source)


@pytest.mark.parametrize("text", ["", "words\n\n# One\n"])
def test_a_source_begins_with_a_title(tmp_path, text):
    with pytest.raises(UsageError, match="the first line must be `# Title`"):
        deck.slides(write(tmp_path, text))


def test_a_comment_in_a_command_is_no_title(tmp_path):
    found = deck.slides(write(tmp_path, "# One\n\n```bash\n# trains\nmake train\n```\n"))
    assert len(found) == 1 and "# trains" in found[0].body
