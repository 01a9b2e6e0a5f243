"""The documents tell the truth: tables are fresh, paths exist, commands are accepted and, in the small, run."""

import functools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATHS, ROOT, V1

from common.analysis import docs

DOCUMENTS = docs.documents()
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
SMALL = "--num-steps 4 --num-layers 1 --hidden-dim 32 --num-heads 4 --intermediate-dim 64"


def commands(document: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in BLOCK.findall(document.read_text()) for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def python_calls(line: str) -> list[list[str]]:
    """[script, arguments...] of each `python script` in a shell line, loops included."""
    return [shlex.split(call)[1:] for call in re.findall(r"\bpython3? [\w./-]+\.py[^;|>]*", line)]


@functools.cache
def flags(script: Path) -> frozenset[str]:
    shown = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True, env={"PYTHONPATH": PATHS}
    )
    return frozenset(re.findall(r"--[\w-]+", shown.stdout))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_tables_are_fresh(document):
    text = document.read_text(encoding="utf-8")
    assert docs.refreshed(text) == text, "run python -m common.analysis.docs"


def test_a_stale_table_is_noticed():
    text = "<!-- table: parameters -->\nold\n<!-- /table -->\n"
    assert docs.refreshed(text) != text and docs.refreshed(docs.refreshed(text)) == docs.refreshed(text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if commands(path)], ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_scripts_and_flags_exist(document):
    folder = V1 if V1 in document.parents else document.parent
    for line in commands(document):
        for script, *arguments in python_calls(line):
            path = next((place / script for place in (folder, V1) if (place / script).exists()), None)
            assert path, f"{script} in: {line}"
            unknown = {argument.split("=")[0] for argument in arguments if argument.startswith("--")} - flags(path)
            assert not unknown, f"{unknown} in: {line}"
        if line.startswith("make "):
            target = line.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def readme_lines(small: bool) -> str:
    """The README's commands of Version 1 as one shell script; the training commands made small by flags added last."""
    script = ["set -eux"]
    for line in commands(V1 / "README.md"):
        if line.startswith("tensorboard"):
            continue
        if small:
            line = re.sub(
                r"(python (?:tiny_llama_v1|run_deepspeed_flops)\.py(?!.*--analyze)[^;|>]*?)(; done|$)", rf"\1 {SMALL}\2", line
            )
            line = line.replace('"4,8,16,32"', '"1,2"').replace('"64,128,256"', '"16"')
        script.append(line)
    return "\n".join(script)


EXPECTED = [
    "metrics_v1.json", "pytorch_profiles/profile_*.json", "pytorch_profiles/trace_*.json", "pytorch_profiles/run_*/events*",
    "memory_analysis/memory_timeline.html", "flops_analysis/flops_profile.json", "flops_analysis/mfu_analysis.csv",
    "flops_analysis/model_profile.txt", "bottleneck_analysis/bottlenecks_v1.md", "bottleneck_analysis/operator_timing.csv",
    "bottleneck_analysis/optimization_targets.json", "scaling_bs32/profile_*.json", "batch_scaling/batch_scaling.csv",
    "batch_scaling/batch_scaling.md", "batch_scaling/batch_scaling.png", "gemm_analysis/gemm_analysis.json",
    "gemm_analysis/gemm_analysis.csv", "gemm_analysis/gemm_analysis.md", "gemm_analysis/gemm_analysis.png",
]  # fmt: skip


@pytest.mark.parametrize("size", ["small", pytest.param("as written", marks=pytest.mark.slow)])
def test_the_readme_of_version_1_runs_and_writes_what_it_says(tmp_path, monkeypatch, size):
    pytest.importorskip("deepspeed")
    folder = tmp_path / "version1_pytorch_baseline"
    shutil.copytree(V1, folder, ignore=shutil.ignore_patterns("pytorch_profiles", "*_analysis", "scaling_*", "metrics_*"))
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    done = subprocess.run(["bash", "-c", readme_lines(size == "small")], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    missing = [pattern for pattern in EXPECTED if not list(folder.glob(pattern))]
    assert not missing
