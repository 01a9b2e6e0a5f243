"""The fusion report as Markdown and as a page."""

import copy
import re
from pathlib import Path

from tests.conftest import ROOT
from tracepage.files import read_json, write_json

FUSION = ROOT / "version2_pytorch_fused/generate_fusion_report.py"


def test_a_fusion_report_without_profiles_has_the_commands(execute, tmp_path):
    execute(FUSION, "--output-dir", "out")
    text = (tmp_path / "out/fusion_report.md").read_text()
    assert "python tiny_llama_v2.py --num-steps 20" in text and "tiny_llama_v1.py" in text


TITLES = ["Conditions", "Kernel counts and step time", "Ablation", "How to repeat"]


def write_profiles(folder: Path, **changes) -> tuple[Path, Path]:
    """A measured profile of Version 1 on a CPU, and one made from it as Version 2: half the calls
    of attention.
    """
    before = read_json(ROOT / "results/cpu/v1_tiny_profile.json.gz")
    after = copy.deepcopy(before)
    after["run"] |= {
        "version": "v2",
        "settings": {"qkv": True},
        "command": "v2.py '<script>alert(1)</script>'",
    } | changes
    for row in after["operators"]:
        if row["span"] == "attention":
            row |= {"self_cpu_us": row["self_cpu_us"] / 2, "calls": row["calls"] // 2}
    for name, profile in (("before", before), ("after", after)):
        (folder / name).mkdir()
        write_json(folder / name / "profile_1.json", profile)
    return folder / "before", folder / "after"


def test_the_page_has_what_the_markdown_has_and_needs_nothing_from_elsewhere(execute, tmp_path):
    before, after = write_profiles(tmp_path)
    execute(FUSION, "--baseline", before, "--fused", after, "--output-dir", "out")
    markdown, page = (
        (tmp_path / "out/fusion_report").with_suffix(suffix).read_text()
        for suffix in (".md", ".html")
    )
    titles = re.findall("^## (.*)", markdown, re.MULTILINE)
    assert titles == TITLES == re.findall(r"<h2[^>]*>([^<]+)", page)
    assert "fusion_ablation_study.py --all-combinations" in markdown
    assert not re.search("<(script|img|iframe|object|embed)", page) and "&lt;script&gt;" in page
    targets = re.findall(r"""\b(?:src|href)=["']?([^"'\s>]*)""", page)
    assert targets and all(target.startswith(("#", "data:")) for target in targets)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_of_several_runs_the_newest_that_compare_are_reported(execute, tmp_path):
    """Half a study of batch sizes: the baseline has 16, 8 and 4, the fused version 8 and 4."""
    before, after = write_profiles(tmp_path)
    for folder, sizes in ((before, (4, 8, 16)), (after, (4, 8))):
        profile = read_json(folder / "profile_1.json")
        for size in sizes:
            profile["run"]["training"]["batch_size"] = size
            write_json(folder / f"profile_{size:03}.json", profile)
        (folder / "profile_1.json").unlink()
    execute(FUSION, "--baseline", before, "--fused", after, "--output-dir", "out")
    text = (tmp_path / "out/fusion_report.md").read_text()
    [others] = [line for line in text.splitlines() if "not in this report" in line]
    assert "before/profile_016.json, batch size (16 and 8)" in others
    assert "after/profile_004.json, batch size (4 and 8)" in others
    assert "profile_008" not in others and "profile_008" in text


def test_what_cannot_be_reported_is_refused_and_nothing_is_written(refused, tmp_path):
    assert "missing holds no profile_*.json" in refused(
        FUSION, "--baseline", "missing", "--output-dir", "out"
    )
    before, after = write_profiles(tmp_path, precision={"compute": "bf16", "tf32": False})
    profiles = "--baseline", before, "--fused", after
    assert "precision compute (fp32 and bf16)" in refused(FUSION, *profiles, "--output", "a.md")
    assert "--output a.html: name a .md file" in refused(
        FUSION, "--baseline", before, "--fused", before, "--output", "a.html"
    )
    assert not list(tmp_path.glob("a.*")) and not (tmp_path / "out").exists()
