"""The fusion report: the same sections in Markdown and HTML, and a page that needs nothing else and looks right in a browser."""

import copy
import html.parser
import http.server
import json
import re
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path

from common.analysis.output import plots
from common.analysis.output.report import Report
from common.documents import fusion_report
from common.errors import UsageError
from common.files import read_json, write_json
from common.studies import ablation
from tests.conftest import ROOT

import pytest

SCRIPT = ROOT / "version2_pytorch_fused" / "generate_fusion_report.py"
TITLES = [
    "Conditions", "Step time", "Kernel counts", "Memory against sequence length", "Roofline", "Ablation", "How to repeat",
]  # fmt: skip
FIGURES = ["step-time", "kernels", "memory", "roofline", "ablation"]
STUDY = ROOT / "results" / "h100" / "v2_ablation_tiny_fp32.json"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_profiles(folder: Path, device: str, **changes) -> tuple[Path, Path]:
    """A measured profile of Version 1, and one made from it as Version 2: half the launches of attention in half the time."""
    before = read_json(ROOT / "results" / device / "v1_tiny_profile.json.gz")
    after = copy.deepcopy(before)
    after["run"] |= {"version": "v2", "settings": {"qkv": True}} | changes
    for row in after["operators"] + after["kernels"]:
        if row["span"] == "attention":
            row |= {key: row[key] / 2 for key in ("self_cpu_us", "self_device_us", "device_us") if key in row}
            row["calls"] //= 2
    for name, profile in (("before", before), ("after", after)):
        (folder / name).mkdir()
        write_json(folder / name / "profile_1.json", profile)
    return folder / "before", folder / "after"


def write_lengths(folder: Path, device: str) -> list[Path]:
    """Profiles at four lengths, with flash attention (memory linear in S) and without (a square term more)."""
    profile = read_json(ROOT / "results" / device / "v1_tiny_profile.json.gz")
    folders = []
    for kind, square in (("flash", 0), ("plain", 2**12)):
        for length in (128, 256, 512, 1024):
            folders.append(folder / f"{kind}_attention_seq{length}")
            folders[-1].mkdir()
            profile["run"] |= {"version": "v2", "settings": {"flash_attention": kind == "flash"}}
            profile["run"]["training"]["sequence_length"] = length
            write_json(
                folders[-1] / "profile_1.json", profile | {"memory_peak_bytes": 2**28 + 2**17 * length + square * length**2}
            )
    return folders


@pytest.fixture(scope="module", params=["h100", "cpu"])
def made(request, tmp_path_factory) -> tuple[str, str]:
    """Markdown and page of a report with all sections, from what was measured on a device."""
    folder = tmp_path_factory.mktemp("report")
    inputs = fusion_report.Inputs(*write_profiles(folder, request.param), STUDY, write_lengths(folder, request.param))
    fusion_report.write(inputs, folder / "out" / "report.md")
    return (folder / "out/report.md").read_text(), (folder / "out/report.html").read_text()


class Elements(html.parser.HTMLParser):
    """The start tags of a page, and the text of its headings."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.headings: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "h2" and data.strip():
            self.headings.append(data)


def test_both_forms_have_the_same_sections_and_figures_have_names(made):
    markdown, page = made
    elements = Elements(page)
    assert re.findall(r"^## (.*)", markdown, re.MULTILINE) == elements.headings == TITLES
    drawn = [attributes for tag, attributes in elements.tags if tag == "svg"]
    assert [attributes["id"] for attributes in drawn] == [f"{name}-figure" for name in FIGURES]
    assert all(attributes["role"] == "img" and attributes["viewbox"] for attributes in drawn)
    assert len(re.findall(r"<svg [^>]*><title>[^<]+</title>", page)) == len(FIGURES)
    assert "Not measured" not in markdown + page


def test_the_page_needs_nothing_from_elsewhere(made):
    elements = Elements(made[1])
    assert not {"script", "img", "iframe", "object", "embed"} & {tag for tag, _ in elements.tags}
    targets = [attributes.get(key) for _, attributes in elements.tags for key in ("src", "href", "xlink:href")]
    assert all(target.startswith(("#", "data:")) for target in targets if target)
    assert not re.search(r"@import|url\((?!#)", made[1])


def test_ids_are_unique_and_references_lead_somewhere(made):
    tags = [attributes for _, attributes in Elements(made[1]).tags]
    ids = [attributes["id"] for attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', made[1])
    assert references and {one or other for one, other in references} <= set(ids)


def test_figures_of_before_and_after_are_in_both(made):
    on_gpu = "GPU idle" in made[0]
    row = next(line for line in made[0].splitlines() if line.startswith("| attention | forward |"))
    cells = [float(cell.replace(",", "")) for cell in row.split("|")[3:5]]
    assert cells[0] == pytest.approx(2 * cells[1], rel=0.02)
    assert ("kernels" if on_gpu else "operator calls") in made[0]
    for text in made:
        assert "v2, " in text and "qkv on" in text and "QKV + flash + SwiGLU + compile" in text


def test_the_same_input_gives_the_same_page(tmp_path):
    inputs = fusion_report.Inputs(*write_profiles(tmp_path, "h100"), STUDY, [])
    for name in "ab":
        fusion_report.write(inputs, tmp_path / f"{name}.md")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_text_of_a_record_is_no_markup(tmp_path):
    folders = write_profiles(tmp_path, "h100", command="v2.py '<script>alert(1)</script>'")
    fusion_report.write(fusion_report.Inputs(*folders, None, []), tmp_path / "a.md")
    assert "<script>" not in (tmp_path / "a.html").read_text() and "&lt;script&gt;" in (tmp_path / "a.html").read_text()


def test_a_section_without_its_measurement_names_the_command(tmp_path):
    before, after = write_profiles(tmp_path, "h100")
    profile = read_json(before / "profile_1.json")
    profile["run"]["ceilings"] = None
    write_json(before / "profile_1.json", profile)
    fusion_report.write(fusion_report.Inputs(before, after, None, []), tmp_path / "a.md")
    parts = dict(part.split("\n", 1) for part in (tmp_path / "a.md").read_text().split("\n## ")[1:])
    assert list(parts) == TITLES
    for title, command in (
        ("Memory against sequence length", "--disable-flash-attention --profile-dir ./plain_attention_seq${seq_len}; done"),
        ("Roofline", "--measure-peak"),
        ("Ablation", "python fusion_ablation_study.py --all-combinations"),
    ):
        assert parts[title].strip().startswith("Not measured") and command in parts[title]
    assert (tmp_path / "a.html").read_text().count("<svg") == 2


@pytest.mark.slow
def test_both_documented_forms(run_script, tmp_path):
    version1, version2 = tmp_path / "version1_pytorch_baseline", tmp_path / "version2_pytorch_fused"
    before, after = write_profiles(tmp_path, "h100")
    for source, targets in (
        (before, (version1 / "complete_analysis", version1 / "pytorch_profiles")),
        (after, (version2 / "complete_rocm_analysis", version2 / "fusion_analysis")),
    ):
        for target in targets:
            shutil.copytree(source, target)
    write_lengths(version2, "h100")
    (version2 / "fusion_ablation").mkdir()
    shutil.copy(STUDY, version2 / "fusion_ablation" / "fusion_ablation.json")
    start = f"import os, runpy, sys; os.chdir('{version2}'); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    (tmp_path / "start.py").write_text(start)  # run_script starts in tmp_path, the documented lines in a version's folder
    named = "--baseline", "../version1_pytorch_baseline/complete_analysis", "--fused", "./complete_rocm_analysis"
    run_script(tmp_path / "start.py", SCRIPT, *named, "--output", "./fusion_comparison_report.md")
    run_script(tmp_path / "start.py", SCRIPT, "--output-dir", "./optimization_analysis")
    for path in (version2 / "fusion_comparison_report", version2 / "optimization_analysis" / "fusion_report"):
        assert "Not measured" not in path.with_suffix(".md").read_text()
        assert path.with_suffix(".html").read_text().count("<svg") == len(FIGURES)


def test_a_missing_profile_names_the_command(refused, tmp_path):
    said = refused(SCRIPT, "--output-dir", "out")
    assert said.startswith("error: ../version1_pytorch_baseline/pytorch_profiles holds no profile_*.json")
    assert "tiny_llama_v1.py --num-steps 30 --profile-dir" in said
    before, _ = write_profiles(tmp_path, "h100")
    with pytest.raises(UsageError, match=r"holds no profile_\*.json: make one with `python tiny_llama_v2.py"):
        fusion_report.write(fusion_report.Inputs(before, tmp_path / "nothing", None, []), tmp_path / "a.md")
    assert not list(tmp_path.glob("**/*.md"))


def test_what_cannot_be_reported_is_refused(tmp_path):
    before, after = write_profiles(tmp_path, "h100", precision={"compute": "bf16", "tf32": False})
    with pytest.raises(UsageError, match=r"precision compute \(fp32 and bf16\)"):
        fusion_report.write(fusion_report.Inputs(before, after, None, []), tmp_path / "a.md")
    with pytest.raises(UsageError, match=r"a\.html: name a \.md file"):
        fusion_report.write(fusion_report.Inputs(before, after, None, []), tmp_path / "a.html")
    (tmp_path / "study.json").write_text("{}")
    same = fusion_report.Inputs(before, before / "profile_1.json", tmp_path / "study.json", [])
    with pytest.raises(UsageError, match="given twice"):
        fusion_report.write(same, tmp_path / "a.md")
    assert not list(tmp_path.glob("a.*"))


@pytest.mark.parametrize("arguments", [[], ["--output", "a.md", "--output-dir", "b"]], ids=["no output", "two outputs"])
def test_one_output_is_named(refused, arguments):
    refused(SCRIPT, *arguments)


def test_svg_is_the_same_each_time_and_scales():
    study = read_json(STUDY, ablation.SCHEMA)
    drawings = {plots.svg(ablation.figure(study, ablation.effects(study["combinations"])), "name", "a < b") for _ in range(2)}
    assert len(drawings) == 1
    head = drawings.pop().split("</title>")[0]
    assert head.startswith('<svg id="name" role="img" viewBox="0 0 ') and head.endswith("<title>a &lt; b")
    assert "width" not in head and "height" not in head


# ------------------------------------------------------------------------------------------------------------ in a browser

WIDTHS = (390, 1280)
WRAPPER = """<!doctype html><link rel="icon" href="data:,"><body>
<script>
function box(element) {
  const r = element.getBoundingClientRect();
  return {left: r.left, right: r.right, width: r.width, height: r.height};
}
window.onload = () => {
  const found = Array.from(document.querySelectorAll("iframe"), frame => {
    const page = frame.contentDocument, root = page.documentElement;
    return {
      visible: root.clientWidth, needed: root.scrollWidth,
      figures: Array.from(page.querySelectorAll("figure svg"), box),
      letters: Array.from(page.querySelectorAll("figure svg text"), text => box(text)),
    };
  });
  document.body.textContent = JSON.stringify(found);
};
</script>
""" + "".join(f'<iframe src="page.html" style="width: {width}px; height: 900px; border: 0"></iframe>' for width in WIDTHS)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and keeps what was asked for."""

    requests: list[str] = []

    def log_message(self, *_) -> None:
        self.requests.append(self.path)


def browse(folder: Path, name: str) -> tuple[str, str]:
    """What the page's document is after it has loaded, and what the browser logged."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}",
             "--window-size=1800,1000", "--enable-logging=stderr", "--dump-dom",
             f"http://127.0.0.1:{server.server_port}/{name}"],
            capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
def test_the_page_in_a_browser(tmp_path, monkeypatch):
    monkeypatch.setattr(Quiet, "requests", [])
    inputs = fusion_report.Inputs(*write_profiles(tmp_path, "h100"), STUDY, write_lengths(tmp_path, "h100"))
    fusion_report.write(inputs, tmp_path / "site" / "page.md")
    (tmp_path / "site" / "wrapper.html").write_text(WRAPPER)
    document, log = browse(tmp_path / "site", "wrapper.html")
    assert "CONSOLE" not in log, log
    assert set(Quiet.requests) == {"/wrapper.html", "/page.html"}
    seen = json.loads(re.search(r"<body>(.*)</body>", document, re.DOTALL)[1])
    assert len(seen) == len(WIDTHS)
    for width, page in zip(WIDTHS, seen, strict=True):
        assert width - 20 <= page["visible"] <= width and page["needed"] <= page["visible"], "the page scrolls downwards only"
        assert len(page["figures"]) == len(FIGURES)
        for figure in page["figures"]:
            assert 0 <= figure["left"] < figure["right"] <= page["visible"] and figure["height"] > 150
            assert figure["width"] > min(0.8 * page["visible"], 500)
        assert min(letter["height"] for letter in page["letters"]) > 8, "pixels"


@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
def test_an_error_in_the_console_would_be_seen(tmp_path):
    report = Report("T")
    report.text("text")
    (tmp_path / "page.html").write_text(report.html().replace("</main>", "<script>throw Error('x')</script></main>"))
    document, log = browse(tmp_path, "page.html")
    assert "CONSOLE" in log and "<p>text</p>" in document
