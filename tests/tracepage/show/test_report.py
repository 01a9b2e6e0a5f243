"""A report: the same content in every form, files that are whole, and nothing drawn where only text
is asked for.
"""

import csv
import json

from tracepage.errors import UsageError
from tracepage.show import plots
from tracepage.show.report import Report

import pytest


def draw():
    figure = plots.new(8, 3)
    figure.subplots().plot([1, 2])
    return figure


@pytest.fixture
def report() -> Report:
    result = Report("A <title>")
    result.text("Before any section, `code<int>` and 1 < 2.", "word " * 60)
    result.section("First part, 1")
    result.facts([("source", "`file.json`"), ("note", "long " * 60)])
    rows = [[f"kernel_{i}<int>", i, i / 3] for i in range(5)]
    header = ["kernel", "calls", "ms"]
    result.table(header, rows, "The longest", csv="all", code=["kernel"], top=2)
    result.figure(draw, "picture", "A line & more")
    result.commands(["python script.py " + "--flag value " * 20])
    result.json("content", {"schema": "x/1"})
    return result


def test_the_terminal_shows_all_but_figures_in_120_columns(report):
    lines = report.terminal().splitlines()
    assert lines[0] == "# A <title>" and "## First part, 1" in lines
    assert all(len(line) <= 120 for line in lines if "python script.py" not in line), (
        "commands alone are not wrapped"
    )
    assert "kernel_1<int>" in report.terminal() and "kernel_2" not in report.terminal()


def test_markdown_escapes_text_and_links_figures_where_they_are_written(report):
    text = report.markdown()
    assert (
        "# A &lt;title>" in text
        and "`code<int>` and 1 &lt; 2" in text
        and "| `kernel_0<int>` |" in text
    )
    assert (
        "**The longest, 2 of 5**" in text
        and "- source: `file.json`" in text
        and "```sh\npython script.py" in text
    )
    assert "picture.png" not in text and "![A line & more](picture.png)" in report.markdown(
        figures=True
    )


def test_the_page_holds_sections_tables_and_an_svg_and_escapes_a_files_text(report):
    page = report.html()
    assert "<title>A &lt;title&gt;</title>" in page and "<code>code&lt;int&gt;</code>" in page
    assert '<a href="#first-part-1">' in page and '<section id="first-part-1">' in page
    assert "<code>kernel_0&lt;int&gt;</code>" in page and "kernel_2" not in page
    assert '<svg id="picture-figure"' in page and "<title>A line &amp; more</title>" in page
    head = page[page.index("<svg") :].split("<title>")[0]
    assert 'role="img" viewBox="0 0 ' in head and "width" not in head and "height" not in head, (
        "it scales"
    )
    assert page == report.html(), "the same report gives the same page"


def test_files_are_written_and_named(report, tmp_path):
    folder = tmp_path / "out"
    text = report.publish(folder, "report", ("md", "csv", "json", "png", "html"))
    names = ["report.md", "all.csv", "content.json", "picture.png", "report.html"]
    assert text.splitlines()[-1] == f"written: {', '.join(str(folder / name) for name in names)}"
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "content.json").read_text()) == {"schema": "x/1"}
    rows = list(csv.reader((folder / "all.csv").open()))
    assert (
        rows[0] == ["kernel", "calls", "ms"]
        and len(rows) == 6
        and rows[2] == ["kernel_1<int>", "1", str(1 / 3)]
    )


def test_a_folder_or_a_name_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--there: cannot write in"):
        Report("Title").write(tmp_path / "file", "report", flag="--there")
    with pytest.raises(UsageError, match=r"--output .*script\.py: name a \.md file"):
        Report("Title").publish_as(tmp_path / "script.py", ("md",), "--output")


def test_a_page_says_once_what_the_title_of_a_picture_says(report, tmp_path):
    """A picture of its own keeps its title, and the page has the words in its text."""
    figures = []

    def draw_titled():
        figures.append(draw())
        figures[-1].axes[0].set_title("One H100")
        return figures[-1]

    report.text("One H100.")
    report.figure(draw_titled, "titled", "A line")
    assert report.html().count("One H100") == 1
    report.write(tmp_path, "report", ("png",))
    assert figures[-1].axes[0].get_title() == "One H100"
