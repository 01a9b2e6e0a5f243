"""The pages in chromium, at the widths of a desktop and of a phone: `make test-browser`."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.small_traces import gpu_trace, record_cpu_trace, write_profile
from tracepage.views import run_page

import pytest

pytestmark = pytest.mark.browser
WIDTHS = {1920: 1080, 390: 844}  # and heights
MOST_MS = 300_000  # to start chromium, to open a page, to find what is looked for
H200 = ROOT / "results" / "h200"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=MOST_MS
        )
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path) -> Iterator[Callable[..., Any]]:
    """opened(html, width=1920): the page. Fails at the end if one wrote to the console or asked for
    anything but itself.
    """
    wrong: list[str] = []
    pages = []

    def open_(html: str, width: int = 1920, **context: Any) -> Any:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(html, encoding="utf-8")
        page = chromium.new_page(viewport={"width": width, "height": WIDTHS[width]}, **context)
        page.set_default_timeout(MOST_MS)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("data:", path.as_uri())) or wrong.append(request.url)
            ),
        )
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert wrong == []


def built(*paths: Path) -> str:
    return run_page.make_page([run_page.load_page_source(path) for path in paths]).html()


@pytest.fixture
def gpu_page(tmp_path) -> str:
    """Of the two steps of `small_traces.gpu_trace`."""
    (tmp_path / "trace_2.json").write_text(json.dumps(gpu_trace()))
    write_profile(
        tmp_path / "profile_2.json", tmp_path / "trace_2.json", device__name="NVIDIA H100 80GB HBM3"
    )
    return built(tmp_path / "profile_2.json")


def frame(page: Any) -> None:
    """Waits until a frame has been drawn."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def press(page: Any, name: str) -> dict[str, str]:
    """Clicks the first event of that name; its numbers by their labels."""
    place = page.evaluate(
        """name => {
          const flat = charts[0].tracks.flatMap(plugin => plugin.flatTree.map(node => [plugin, node]));
          const [plugin, {source, level}] = flat.findLast(([_, node]) => node.source.name === name);
          const {x, y, w} = plugin.calcRect(source.start, source.duration, level);
          return {x: x + w / 2, y: y + plugin.renderEngine.position + 8};
        }""",
        name,
    )
    page.locator("canvas").first.hover(position=place)
    frame(page)  # the library looks for what lies below the mouse a frame later
    page.locator("canvas").first.click(position=place)
    terms = page.locator(".chosen dt").all_inner_texts()
    return dict(zip(terms, page.locator(".chosen dd").all_inner_texts(), strict=True))


def test_a_kernel_shows_its_numbers(opened, gpu_page):
    found = press(opened(gpu_page), "gemm")
    assert (
        found["operator"] == "aten::mm"
        and found["shapes"] == "[[4, 8], [8, 8]]"
        and found["track"] == "GPU, stream 7"
    )
    assert found["time"] == "59 us" and found["span"] == "mlp"


def test_a_link_to_a_wait_shows_all_of_it_in_the_timeline(opened, gpu_page):
    page = opened(gpu_page)
    link = page.locator("a[data-from]").first
    link.click()
    frame(page)
    shown = dict(
        zip(
            page.locator(".chosen dt").all_inner_texts(),
            page.locator(".chosen dd").all_inner_texts(),
            strict=True,
        )
    )
    assert shown["track"] == "GPU waits, by cause"
    length = link.inner_text().split(" in step")[0]
    assert f"{shown['time']} ".startswith(f"{length} ")
    marked = page.evaluate("charts[0].marked.reduce((sum, {ns}) => sum + ns[1], 0)")
    assert marked == page.evaluate("charts[0].marked[0].ns[2]")
    step = page.evaluate("charts[0].engine.max - charts[0].engine.min")
    assert page.evaluate("charts[0].engine.getRealView()") < step


@pytest.mark.parametrize("width", WIDTHS)
def test_times_at_the_edge_of_the_grid_are_whole_or_left_out(opened, gpu_page, width):
    page = opened(gpu_page, width)
    for action in ("in", "in", "right", "right", "all"):
        page.locator(f"[data-do={action}]").first.click()
        frame(page)
        places, most = page.evaluate(
            """() => {
              const {chart, engine} = charts[0], places = [];
              const fillText = (text, x) => places.push([x, x + engine.ctx.measureText(text).width]);
              chart.timeGrid.renderTimes(Object.create(engine, {fillText: {value: fillText}}));
              return [places, engine.width];
            }"""
        )
        assert places and all(start >= 0 and end <= most for start, end in places)


def test_the_empty_part_of_a_stream_tells_why_the_gpu_waits(opened, gpu_page):
    page = opened(gpu_page)
    place = page.evaluate(
        """() => {
          const stream = charts[0].tracks.findLast(({name}) => name.startsWith("GPU, stream"));
          const node = charts[0].data.nodes.find(({track}) => track === WAITS);
          const {x, w} = stream.calcRect(node.start, node.duration, 0);
          return {x: x + w / 2, y: stream.renderEngine.position + 8};
        }"""
    )
    page.locator("canvas").first.hover(position=place)
    frame(page)
    page.locator("canvas").first.click(position=place)
    assert "GPU waits, by cause" in page.locator(".chosen dd").all_inner_texts()


@pytest.mark.parametrize("width", WIDTHS)
def test_lines_of_the_grid_lie_at_round_times(opened, gpu_page, width):
    page = opened(gpu_page, width)
    for _ in range(4):
        delta, times = page.evaluate(
            """() => {
              const grid = charts[0].chart.timeGrid, times = [];
              grid.forEachTime((place, time) => times.push(time));
              return [grid.delta, times];
            }"""
        )
        assert round(delta / 10 ** math.floor(math.log10(delta) + 1e-9), 6) in (1, 2, 5)
        assert times and all(abs(time / delta - round(time / delta)) < 1e-6 for time in times)
        page.locator("[data-do=in]").first.click()
        frame(page)


def test_a_narrow_page_shows_the_share_of_the_step_without_scrolling(opened, gpu_page):
    page = opened(gpu_page, 390)
    for head in page.locator("th", has_text="% of step").all():
        box = head.bounding_box()
        assert box["x"] + box["width"] <= 390


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_pages_fit_a_desktop_and_a_phone(opened, tmp_path, width, theme):
    """Of a CPU's run with memory, of a trace of a GPU, and of a trace of another program."""
    record_cpu_trace(tmp_path / "trace_1.json")
    write_profile(tmp_path / "profile_1.json", tmp_path / "trace_1.json")
    events = [
        {"ph": kind, "name": "work", "pid": 1, "tid": 1, "ts": time}
        for kind, time in (("B", 1), ("B", 2), ("E", 3), ("E", 9))
    ]
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": events}))
    runs = (
        tmp_path / "profile_1.json",
        tmp_path / "other.json",
        H200 / "traces" / "v4_small.json.gz",
    )
    for html in map(built, runs):
        page = opened(html, width, color_scheme=theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert len(html) < 5e6
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(22, 22, 22)" if theme == "dark" else "rgb(255, 255, 255)")
        for figure in page.locator("figure svg").all():
            box = figure.bounding_box()
            assert (
                box["x"] >= 0
                and box["x"] + box["width"] <= width
                and box["width"] > min(0.8 * width, 500)
            )
