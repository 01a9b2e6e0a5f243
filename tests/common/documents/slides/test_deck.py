"""The slides: one file with everything in it, short texts, and keys that work in a browser."""

import base64
import html
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from common.documents import rewrite
from common.documents.slides import deck
from common.errors import UsageError
from tests.conftest import ROOT

import pytest
from matplotlib.image import imread

TEXT = deck.SOURCE.read_text(encoding="utf-8")
KEYS = ["ArrowRight", " ", "PageDown", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft", "n", "t"]
PRESS = """<script>
addEventListener("load", () => {
  const seen = [], full = [], at = () => sections.findIndex(section => getComputedStyle(section).display !== "none") + 1;
  for (const key of %s) {
    document.dispatchEvent(new KeyboardEvent("keydown", {key}));
    const notes = document.querySelectorAll(".notes")[at() - 1];
    seen.push([key, at(), document.getElementById("number").textContent, getComputedStyle(notes).display !== "none"]);
  }
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "n"}));
  for (let number = 0; number < sections.length; number++) {
    show(number);
    const {scrollHeight, clientHeight, scrollWidth, clientWidth} = sections[number];
    if (scrollHeight > clientHeight + 1 || scrollWidth > clientWidth + 1) full.push(number + 1);
  }
  document.documentElement.dataset.result = JSON.stringify({seen, full, theme: document.documentElement.dataset.theme});
});
</script></body>"""


@pytest.fixture(scope="module")
def page() -> str:
    return deck.page(deck.slides(deck.SOURCE))


def test_every_slide_has_one_title_and_the_deck_fits_half_a_day(page):
    titles = [re.findall("<h[12][^>]*>(.+?)</h[12]>", section) for section in page.split("<section ")[1:]]
    assert all(len(title) == 1 for title in titles) and len({title[0] for title in titles}) == len(titles)
    assert 25 <= len(titles) <= 32


def test_all_pictures_and_tables_of_the_source_are_in_the_page(page):
    kinds = [match[2] for match in rewrite.MARKED.finditer(TEXT)]
    images = re.findall("<img ([^>]*)>", page)
    tables = kinds.count("table") + kinds.count("section")
    assert len(images) == kinds.count("picture") > 5 and page.count("<table") == tables > 1
    for image in images:
        content = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', image)[1]
        assert ElementTree.fromstring(base64.b64decode(content)).tag.endswith("svg") and re.search('alt="[^"]', image)


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


def test_words_of_tables_and_notes_do_not_count(tmp_path):
    table = "<!-- table: presets -->\n\n| a b c | d |\n| --- | --- |\n| e f | g |\n\n<!-- /table -->\n"
    found = deck.slides(write(tmp_path, f"# One\n\n- two **three**\n\nNote: `four` five.\n## Six\n\n{table}\nseven\n"))
    assert [(slide.title, slide.words) for slide in found] == [("One", 2), ("Six", 1)]
    assert found[0].notes == "<p><code>four</code> five.</p>" and "<strong>three</strong>" in found[0].body
    assert "four" not in found[0].body and found[1].body.count("<figure>") == 1 and "<td>e f</td>" in found[1].body


def test_a_slide_with_too_many_words_is_named(tmp_path):
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


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["deck", "--output", str(tmp_path / "new.html")])
    deck.main()
    assert (tmp_path / "new.html").read_text(encoding="utf-8").count("<section ") == len(deck.slides(deck.SOURCE))
    assert "written" in capsys.readouterr().out


def test_keys_move_through_the_slides_in_a_browser(page, browser, tmp_path):
    """And no slide is too full for a window of 1280 x 720."""
    path = tmp_path / "slides.html"
    path.write_text(page.replace("</body>", PRESS % json.dumps(KEYS)), encoding="utf-8")
    shown = re.search(r'data-result="([^"]*)"', browser("--dump-dom", path.as_uri()))
    result = json.loads(html.unescape(shown[1]))
    last = page.count("<section ")
    places = [2, 3, 4, 3, last, last, 1, 1, 1, 1]
    assert result["seen"] == [
        [key, place, f"{place} / {last}", key in KEYS[-2:]] for key, place in zip(KEYS, places, strict=True)
    ]
    assert result["full"] == [] and result["theme"] in ("dark", "light")


def test_a_browser_shows_each_slide_by_its_number(page, browser, tmp_path):
    path = tmp_path / "slides.html"
    path.write_text(page, encoding="utf-8")
    images = []
    for number in (1, 2):
        browser(f"--screenshot={tmp_path / f'{number}.png'}", f"{path.as_uri()}#{number}")
        images.append(imread(tmp_path / f"{number}.png"))
    assert all(image.std() > 0.01 for image in images)  # something is drawn
    assert abs(images[0] - images[1]).mean() > 0.01
