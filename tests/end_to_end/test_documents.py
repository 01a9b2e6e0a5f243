"""The documents tell the truth: tables are fresh, paths exist, commands are accepted and, in the small, run."""

import ast
import collections
import contextlib
import functools
import importlib.util
import io
import itertools
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from common import data
from common.analysis.comparisons import source_diff
from common.documents import rewrite
from tests.conftest import INTERPRETER_FAILS, PATHS, ROOT, V1

import pytest
import torch

V2, V3, V4 = (ROOT / name for name in ("version2_pytorch_fused", "version3_triton", "version4_ultra_fused"))
VERSIONS = sorted({path.parent for path in ROOT.glob("version*/tiny_llama_v*.py")}, reverse=True)
DOCUMENTS = rewrite.documents()
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ANCHORED_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
ARGUMENTS = r"[^;|>&)]*"  # up to what ends a command in a shell line
CALL = re.compile(rf"\b(?:python3?|bash|torchrun(?: --[\w-]+(?:[= ][\w.:$]+)?)*) ([\w./-]+\.(?:py|sh)\b{ARGUMENTS})")
PATH = re.compile(r"(?:\.\./)*\b(?:common|tests|results)/(?!NAME)[\w./-]*\w(?![\w*{$])")
MODULE = re.compile(r"\bcommon(?:\.\w+)+(?!\.md)")
PYTHON = re.compile(r'^python -c "(.*)"$', re.MULTILINE)
TESTS = re.compile(r"\bpytest ([\w./-]+\.py)(?: -k (\w+))?")
VENDOR_TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "ncu", "nsys")
WITH_TRITON = ("compile_kernels.py", "tune_blocks.py")  # these import it, even to show their flags
GPU, TRITON = torch.cuda.is_available(), bool(importlib.util.find_spec("triton"))
# Scripts that hand flags which are not theirs to a version.
HAND_ON = (
    "validate_numerical_accuracy.py", "optimize_batch_size.py", "run_all_profilers.sh", "run_rocprofv3.sh", "run_rocprof_sys.sh",
    "run_rocprof_compute.sh", "run_rocprof_triton.sh",
)  # fmt: skip


def commands(document: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for block in BLOCK.findall(document.read_text()) for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def calls(line: str) -> list[list[str]]:
    """[script, arguments...] of each `python script.py`, `torchrun ... script.py` and `bash script.sh` in a shell line.

    A command after `--` is a call of its own.
    """
    return [shlex.split(call) for part in re.split(r" -- (?=python|bash|torchrun)", line) for call in CALL.findall(part)]


def find_script(document: Path, script: str) -> Path | None:
    """As seen from the document's folder, from the version folder above it, or else from the newest version that has it."""
    above = [folder for folder in VERSIONS if folder in document.parents]
    return next((folder / script for folder in (document.parent, *above, *VERSIONS) if (folder / script).is_file()), None)


@functools.cache
def flags(script: Path) -> frozenset[str]:
    """All that its --help names. A Python script runs in this process, which has imported PyTorch already."""
    if script.suffix == ".sh":
        shown = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True).stdout
    else:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.setattr(sys, "argv", [str(script), "--help"])
            with contextlib.suppress(SystemExit):
                runpy.run_path(str(script), run_name="__main__")
        shown = output.getvalue()
    known = frozenset(re.findall(r"--[\w-]+", shown))
    return known | flags(V2 / "tiny_llama_v2.py") if script.name in HAND_ON else known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_tables_are_fresh(document):
    text = document.read_text(encoding="utf-8")
    assert rewrite.refreshed(text, document.parent) == text, "run python -m common.documents"


def test_each_table_and_picture_stands_on_one_page():
    """Another page links it. The slides repeat some."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS if path.parent.name != "slides")
    markers = collections.Counter(marked[1].strip() for marked in rewrite.MARKED.finditer(text))
    assert [marker for marker, times in markers.items() if times > 1] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


def anchors(document: Path) -> set[str]:
    """Its anchors, and those that GitHub makes of its headings: lower case, without punctuation, hyphens for spaces."""
    text = document.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(ANCHOR.findall(text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_anchors_that_exist(document):
    for target, anchor in ANCHORED_LINK.findall(document.read_text(encoding="utf-8")):
        assert anchor in anchors(document.parent / target if target else document), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pictures_are_current_and_load_fast(document):
    for picture in rewrite.pictures(document.read_text(encoding="utf-8")):
        path = rewrite.file_of(picture)
        assert picture.is_current(path), f"{path}: run python -m common.documents"
        assert path.stat().st_size < 150_000, path


def test_every_term_is_in_the_glossary():
    """Each term that CONCEPTS.md explains, and no other, and each once."""
    text, before, glossary = (ROOT / "CONCEPTS.md").read_text(encoding="utf-8").partition("\n## Glossary\n")
    listed = re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \|", before + glossary, re.MULTILINE)
    assert listed and sorted(listed) == sorted(ANCHOR.findall(text))


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *(folder / "README.md" for folder in VERSIONS)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_readme_links_the_concepts(document):
    linked = [anchor for target, anchor in ANCHORED_LINK.findall(document.read_text()) if target.endswith("CONCEPTS.md")]
    assert set(linked) & set(ANCHOR.findall((ROOT / "CONCEPTS.md").read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_and_modules_exist(document):
    text = document.read_text(encoding="utf-8")
    for path in PATH.findall(text):
        assert any((base / path).exists() for base in (document.parent, ROOT, *VERSIONS)), path
    for name in MODULE.findall(text):
        assert pkgutil.resolve_name(name), name
    for code in PYTHON.findall(text):
        imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), document.name, "exec"), {})


def test_documented_scripts_and_flags_exist():  # one test, so that each script is asked for its flags once
    for document, line in [(path, line) for path in DOCUMENTS for line in commands(path)]:
        place = f"in {document.relative_to(ROOT)}: {line}"
        for script, *arguments in calls(line):
            path = find_script(document, script)
            assert path, f"no {script}, {place}"
            if path.name in WITH_TRITON and not TRITON:
                continue
            unknown = {argument.split("=")[0] for argument in arguments if argument.startswith("--")} - flags(path) - {"--"}
            assert not unknown, f"{unknown} {place}"
        for script, chosen in TESTS.findall(line):
            path = find_script(document, script)
            assert path, f"no {script}, {place}"
            assert f"def test_{chosen}" in path.read_text(), f"no test is called {chosen}, {place}"
        if line.startswith("make "):
            target = line.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), place


# What makes a command of Version 1's page small: flags that are added last, and so replace the command's own.
TRAINING = "--num-steps 4 --num-layers 1 --hidden-dim 32 --num-heads 4 --intermediate-dim 64"
SMALL_FLAGS = {
    "tiny_llama_v1.py": TRAINING,
    "run_pytorch_profiler.py": TRAINING,
    "run_deepspeed_flops.py": TRAINING,
    "analyze_gemm_operations.py": "--batch-sizes 1,2 --sequence-lengths 16",
}


def expanded(line: str) -> list[str]:
    """The commands of a shell line, a loop's one for each value."""
    if loop := re.fullmatch(r"for (\w+) in ([^;]+); do (.*); done", line):
        name, values, body = loop.groups()
        return [re.sub(rf"\${name}\b|\${{{name}}}", value, body) for value in values.split()]
    return [line]


def runs_here(line: str) -> bool:
    """TensorBoard does not end; a vendor's profiler has to be there, an interpreter that works, and GPUs for their sizes."""
    tool = "rocprofv3" if "run_rocprof_triton.sh" in line else line.split()[0]
    if INTERPRETER_FAILS and tool == "TRITON_INTERPRET=1":
        return False
    if not GPU and re.search(r"scaling_study\.py --preset (medium|large)", line):
        return False
    return tool != "tensorboard" and (tool not in VENDOR_TOOLS or bool(shutil.which(tool)))


# Tiles are timed, steps are captured and clocks are sampled on a GPU; without one the script says so, with exit code 2.
GPU_ONLY = ("tune_blocks.py", "benchmark_levers.py", "--capture-step", "sample_gpu.py")


def refused_here(line: str) -> bool:
    return not GPU and any(word in line for word in GPU_ONLY)


# Added to commands as written: they repeat their work less often, or search less far.
LESS = {"benchmark_suite.py": "--repeats 1 --num-steps 1", "optimize_batch_size.py": "--max-batch-size 64"}


def as_script(readme: Path) -> str:
    """The README's commands as one shell script that ends at the first that fails."""
    lines = [line for line in commands(readme) if runs_here(line)]
    lines = [" ".join([line, *(flags for script, flags in LESS.items() if script in line)]) for line in lines]
    # Exit code 1 says that this machine does not reach the speed-up, not that the command is wrong.
    lines = [f"{line} || [ $? -eq 1 ]" if "performance_regression_test.py" in line else line for line in lines]
    lines = [f"{line} && exit 9 || [ $? -eq 2 ]" if refused_here(line) else line for line in lines]
    return "\n".join(["set -eux", *lines])


EXPECTED = {
    V1: [
        "metrics_v1.json", "pytorch_profiles/profile_*.json", "pytorch_profiles/trace_*.json", "pytorch_profiles/run_*/events*",
        "memory_analysis/memory_timeline.html", "flops_analysis/flops_profile.json", "flops_analysis/mfu_analysis.csv",
        "flops_analysis/model_profile.txt", "bottleneck_analysis/bottlenecks_v1.md", "bottleneck_analysis/operator_timing.csv",
        "bottleneck_analysis/optimization_targets.json", "scaling_bs32/profile_*.json", "batch_scaling/batch_scaling.csv",
        "batch_scaling/batch_scaling.md", "batch_scaling/batch_scaling.png", "gemm_analysis/gemm_analysis.json",
        "gemm_analysis/gemm_analysis.csv", "gemm_analysis/gemm_analysis.md", "gemm_analysis/gemm_analysis.png",
    ],
    V2: [
        "../version2_baseline_comparison.log", "fused_performance.log", "metrics_v2.json", "../version1_baseline_metrics.json",
        "version2_metrics.json", "fusion_analysis/profile_*.json", "fusion_analysis/trace_*.json", "fusion_analysis/report.md",
        "kernel_reduction/kernel_reduction.csv", "kernel_reduction/kernel_reduction.md", "kernel_reduction/kernel_reduction.png",
        "flash_attention_seq*/profile_*.json", "plain_attention_seq*/profile_*.json", "sequence_memory/sequence_memory.csv",
        "sequence_memory/sequence_memory.md", "sequence_memory/sequence_memory.png", "flops_analysis/flops_profile.json",
        "flops_analysis/roofline.png", "flops_analysis/roofline.csv", "fusion_ablation/fusion_ablation.json",
        "fusion_ablation/fusion_ablation.csv", "fusion_ablation/fusion_ablation.md", "fusion_ablation/fusion_ablation.png",
        "batch_size_search/batch_search.json", "batch_size_search/batch_search.csv", "batch_size_search/batch_search.md",
        "batch_size_search/batch_search.png", "benchmark_suite/benchmark.json", "benchmark_suite/benchmark.csv",
        "benchmark_suite/benchmark.md", "benchmark_suite/benchmark.png", "complete_rocm_analysis/profile_*.json",
        "../version1_pytorch_baseline/complete_analysis/profile_*.json", "memory_bandwidth/bandwidth.csv",
        "memory_bandwidth/bandwidth.md", "memory_bandwidth/roofline.png", "optimization_analysis/fusion_report.md",
        "optimization_analysis/fusion_report.html", "fusion_comparison_report.md", "fusion_comparison_report.html",
    ],
    V3: [
        "metrics_v3.json", "metrics_kernels.json", "metrics_kernels.png", "pytorch_profiles/profile_*.json",
        "pytorch_profiles/trace_*.json", "pytorch_profiles/run_*/events*", "pytorch_profiles/report.md",
        "flops_analysis/flops_profile.json", *(["tiles.json"] if GPU else []),
    ],
    V4: [
        "metrics_v4.json", "pytorch_profiles/profile_*.json", "flops_analysis/flops_profile.json",
        "performance_study/tiny/performance_study.md", "performance_study/tiny/performance_study.html",
    ],
}  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the version folders side by side, their scripts and packages only."""
    for version in EXPECTED:
        (tmp_path / version.name).mkdir()
        for path in version.iterdir():
            if path.suffix in (".py", ".sh", ".yaml"):
                shutil.copy(path, tmp_path / version.name)
            elif path.is_symlink():
                (tmp_path / version.name / path.name).symlink_to(path.resolve())
            elif (path / "__init__.py").exists():
                shutil.copytree(path, tmp_path / version.name / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    # What `rocprofv3 -o results.csv` writes, where there is no rocprofv3.
    shutil.copy(ROOT / "tests/fixtures/kernels/new_kernel_trace.csv", tmp_path / V2.name / "results.csv_kernel_trace.csv")
    return tmp_path


def missing(version: Path, folder: Path) -> list[str]:
    return [pattern for pattern in EXPECTED[version] if not list(folder.glob(pattern))]


@pytest.mark.usefixtures("known_ceilings")
def test_the_page_of_version_1_with_a_small_model(execute, monkeypatch, tmp_path):
    """Its Python commands, in this process."""
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(data, "load", functools.cache(data.load))
    shutil.copy(V1 / "tiny_llama_v1_config.yaml", tmp_path)
    for line in itertools.chain.from_iterable(map(expanded, commands(V1 / "README.md"))):
        program, script, *arguments = shlex.split(line)
        if program == "python":
            paths = [sorted(map(str, tmp_path.glob(word))) if "*" in word else [word] for word in arguments]
            flags = [*itertools.chain.from_iterable(paths), *SMALL_FLAGS.get(script, "").split()]
            execute(V1 / script, *flags, check=2 if refused_here(line) else 0)
    assert missing(V1, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", EXPECTED, ids=lambda version: version.name)
def test_the_readme_runs_and_writes_what_it_says(copied, monkeypatch, version):
    pytest.importorskip("deepspeed")
    if version in (V3, V4):
        pytest.importorskip("triton")
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tests run beside each other
    folder = copied / version.name
    done = subprocess.run(["bash", "-c", as_script(version / "README.md")], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert missing(version, folder) == []


def test_the_diff_of_two_forward_passes_has_the_methods_that_differ(tmp_path):
    for name, body in (("a", "return x"), ("b", "x = 2 * x\n        return x")):
        (tmp_path / f"{name}.py").write_text(
            f"class Same:\n    def forward(self, x):\n        return -x\n\n\nclass Other:\n    def __init__(self):\n"
            f"        self.{name} = 0\n\n    def forward(self, x):\n        {body}\n"
        )
    shown = source_diff.forward_diff(tmp_path / "a.py", tmp_path / "b.py")
    assert shown == "```diff\n  # Other.forward\n def forward(self, x):\n+    x = 2 * x\n     return x\n```\n"
