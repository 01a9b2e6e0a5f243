"""The road is walked: the commands of the pages run, in the order of the pages, and leave the files
that the pages name.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import INTERPRETER_FAILS, ROOT, V1
from tests.pages import CALL, LINK, TESTS, V2, V3, V4, commands

import pytest
import torch

GPU = torch.cuda.is_available()
OPTIONAL_TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "ncu", "nsys", "tlparse")
UNSOLVED = "why_compile_did_not_help"  # its page reads what the compiler says of the starter
# Flags that are added last, and so replace the command's own: they repeat the work less often, or
# search less far.
TRAINING = "--num-steps 4 --data synthetic"
SMALL = {
    "tiny_llama_v?.py": TRAINING,
    "v3_stage?_*.py": TRAINING,
    "stage_?.py": TRAINING,
    "run_*_profil*.py": TRAINING,
    "run_deepspeed_flops.py": TRAINING,
    "train.py": "--num-steps 4",
    # it names the script of a version, and takes none of its flags
    "validate_numerical_accuracy.py": "",
    "analyze_gemm_operations.py": "--batch-sizes 1,2 --sequence-lengths 16",
    "fusion_ablation_study.py": "--rounds 1",
    "benchmark_suite.py": "--batch-sizes 2 --seq-lengths 16 --repeats 1 --num-steps 1",
    "optimize_batch_size.py": "--max-batch-size 4",
    "lab.py": "--parts components --batch-size 1 --seq-len 16 --seq-lens 16,32",
    "benchmark_kernels.py": "--operations rms_norm --sizes 32x16",
    "tune_blocks.py": "--block-m 64 --block-n 64 --warps 4",
    "run_all_stages.sh": '--stages "0 5"',
}
SIZES = "num_layers=1, hidden_size=32, num_attention_heads=8, num_key_value_heads=4, intermediate_size=64"
PRESETS = f"""
for sections in PRESETS.values():
    sections["model"] |= dict({SIZES})
    sections["training"]["sequence_length"] = 32
"""
EXPECTED = {  # by folder: files that its pages name, of which some are left by each command
    V1: [
        "metrics_v1.json",
        "pytorch_profiles/profile_*.json",
        "pytorch_profiles/trace_*.json",
        "pytorch_profiles/run_*/events*",
        "memory_analysis/run.html",
        "memory_analysis/memory_timeline.html",
        "flops_analysis/flops_profile.json",
        "flops_analysis/mfu_analysis.csv",
        "flops_analysis/model_profile.txt",
        "bottleneck_analysis/bottlenecks_v1.md",
        "bottleneck_analysis/operator_timing.csv",
        "scaling_bs32/profile_*.json",
        "bottleneck_analysis/optimization_targets.json",
        "batch_scaling/batch_scaling.*",
        "gemm_analysis/gemm_analysis.*",
    ],
    V2: [
        "../version2_baseline_comparison.log",
        "fused_performance.log",
        "metrics_v2.json",
        "../version1_baseline_metrics.json",
        "version2_metrics.json",
        "fusion_analysis/profile_*.json",
        "fusion_analysis/trace_*.json",
        "fusion_analysis/report.md",
        "kernel_reduction/kernel_reduction.*",
        "flash_attention_seq*/profile_*.json",
        "plain_attention_seq*/profile_*.json",
        "sequence_memory/sequence_memory.*",
        "flops_analysis/roofline.*",
        "fusion_ablation/fusion_ablation.*",
        "batch_size_search/batch_search.*",
        "benchmark_suite/benchmark.*",
        "complete_rocm_analysis/profile_*.json",
        "../version1_pytorch_baseline/complete_analysis/profile_*.json",
        "memory_bandwidth/roofline.png",
        "optimization_analysis/fusion_report.*",
        "fusion_comparison_report.*",
    ],
    V3: [
        "metrics_v3.json",
        "metrics_kernels.*",
        "pytorch_profiles/profile_*.json",
        "pytorch_profiles/run_*/events*",
        "flops_analysis/flops_profile.json",
        "exercises/performance_debugging/results/comparison.md",
    ],
    V4: ["metrics_v4.json", "pytorch_profiles/profile_*.json", "flops_analysis/flops_profile.json"],
    ROOT / "decoding": [],
}
# Steps are captured and clocks are sampled on a GPU; without one the script says so, with exit code
# 2.
GPU_ONLY = ("--capture-step",)
MACHINE = re.compile(r"On a laptop|On (?:a|an AMD|an NVIDIA|two) GPU|needs a GPU")
# The steps of a page: its paragraphs, and the commands of its blocks.
PARAGRAPH = re.compile(r"```bash\n(?P<block>.*?)```|(?P<text>.+?)\n\s*(?:\n|(?=```))", re.DOTALL)


def missing(version: Path, folder: Path) -> list[str]:
    return [pattern for pattern in EXPECTED[version] if not list(folder.glob(pattern))]


def expanded(line: str) -> list[str]:
    """The commands of a shell line, a loop's one for each value."""
    if loop := re.fullmatch(r"for (\w+) in ([^;]+); do (.*); done", line):
        name, values, body = loop.groups()
        return [re.sub(rf"\${name}\b|\${{{name}}}", value, body) for value in values.split()]
    return [line]


def runs_here(line: str) -> bool:
    """TensorBoard does not end, tests/test_exercises.py runs what pytest does here, and `make
    train` has saved no model.

    An optional tool has to be there, which may have written what the line reads, an interpreter that
    works, and GPUs for their sizes.
    """
    tool = "rocprofv3" if "run_rocprof_triton.sh" in line else line.split()[0]
    if re.search("^(tensorboard|pip|pytest) | pytest |/model ", line) or (
        tool in OPTIONAL_TOOLS and not shutil.which(tool)
    ):
        return False
    if INTERPRETER_FAILS and tool == "TRITON_INTERPRET=1":
        return False
    written = re.search(r"complete_rocm_analysis/(ncu|nsys)", line)
    if written and not shutil.which(written[1]):
        return False
    return GPU or not re.search(r" scaling_(\$n|\*)", line)


def each_has_a_gpu(line: str) -> bool:
    """Whether a GPU is there for each process of torchrun; without any they run on the CPU."""
    processes = re.search(r"--nproc-per-node (\d+)(?!.*--device cpu)", line)
    return not GPU or not processes or int(processes[1]) <= torch.cuda.device_count()


def is_here(machine: str) -> bool:
    """Whether this is such a machine, in the words of MACHINE. What a laptop does any can do."""
    other = "NVIDIA" if torch.version.hip else "AMD"
    return machine == "On a laptop" or (GPU and other not in machine)


def exit_codes(line: str) -> tuple[int, ...]:
    """1 where a model does not train, where 16 bits exceed the tolerance, and where a machine
    misses the speed-up asked for.
    """
    if not GPU and any(word in line for word in GPU_ONLY):
        return (2,)
    if "handouts/stage_b.py" in line or re.search(
        r"validate_numerical_accuracy\.py .*--use-amp", line
    ):
        return (1,)
    return (0, 1) if "performance_regression_test.py" in line else (0,)


def steps(page: Path) -> list[str]:
    """Its commands but for those that the paragraph before gives to another machine. A
    here-document is one command.
    """
    found, here = [], True
    for step in PARAGRAPH.finditer(page.read_text(encoding="utf-8")):
        if step["text"]:
            machines = MACHINE.findall(step["text"])
            here = not machines or is_here(machines[-1])
        elif here:
            block = re.sub(
                r" <<'END'\n.*?\nEND\n",
                lambda text: text[0].replace("\n", "\0"),
                step["block"],
                flags=re.DOTALL,
            )
            lines = [line.split("  #")[0].strip() for line in block.splitlines()]
            found += [
                line.replace("\0", "\n")
                for line in lines
                if line and not line.startswith("#") and runs_here(line)
            ]
    return found


def pages(version: Path) -> list[Path]:
    """The version's README, then the pages of its folder in the order in which they are linked."""
    found = [version / "README.md"]
    for page in found:  # which grows
        linked = [
            (page.parent / link).resolve()
            for link in LINK.findall(page.read_text(encoding="utf-8"))
        ]
        found += dict.fromkeys(
            path
            for path in linked
            if path.suffix == ".md" and version in path.parents and path not in found
        )
    return found


def folder_of(page: Path) -> Path:
    """Where the page's commands run: the nearest folder that has the script or the tests which the
    page names first.
    """
    text = "\n".join(line for line in commands(page) if not line.startswith("(cd"))
    script = min([*CALL.finditer(text), *TESTS.finditer(text)], key=re.Match.start)[1].split()[0]
    return next(folder for folder in (page.parent, *page.parents) if (folder / script).exists())


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The repository's files as a clone has them, with small presets and with the exercises solved."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    folder = tmp_path / "a clone"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    with open(folder / "common/config.py", "a") as config:
        config.write(PRESETS)
    for solution in folder.glob("**/solution/*.py"):
        exercise = solution.parents[1]
        if exercise.name != UNSOLVED:
            shutil.copy(
                solution, exercise / ("src" if exercise.name == "profiling_lab" else "starter")
            )
    return folder


@pytest.fixture
def small_programs(tmp_path: Path) -> Path:
    """A folder with programs that start the real ones with the flags of SMALL."""
    cases = "\n".join(f'{script}) set -- "$@" {flags}; break ;;' for script, flags in SMALL.items())
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "bash", "torchrun"):
        start = shutil.which(name) if name == "bash" else Path(sys.executable).with_name(name)
        (folder / name).write_text(
            f'#!/bin/sh\nfor word; do\ncase ${{word##*/}} in\n{cases}\nesac\ndone\nexec {start} "$@"\n'
        )
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_road_has_no_stop(clone, small_programs, tmp_path):
    """All versions' pages, one after the other in one folder."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    pytest.importorskip("triton", reason="needs Triton")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": os.pathsep.join(
            (str(small_programs), str(Path(sys.executable).parent), os.environ["PATH"])
        ),
        "OMP_NUM_THREADS": "1",
    }
    stops: list[str] = []
    for page in itertools.chain.from_iterable(map(pages, EXPECTED)):
        lines = steps(page)
        settings = "\n".join(line for line in lines if line.startswith("SIZES="))
        commands_here = filter(each_has_a_gpu, itertools.chain.from_iterable(map(expanded, lines)))
        for line in commands_here:
            done = subprocess.run(
                ["bash", "-c", f"{settings}\n{line}"],
                cwd=clone / folder_of(page).relative_to(ROOT),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=3600,
            )
            with open(tmp_path / "walk.log", "a") as log:
                log.write(f"=== {page.relative_to(ROOT)}: {line}\n{done.stdout}\n")
            if (
                done.returncode not in exit_codes(line)
                or "Traceback (most recent call last)" in done.stdout
            ):
                stops.append(
                    f"{page.relative_to(ROOT)}: {line}\nexit code {done.returncode}: {done.stdout[-600:]}"
                )
    assert not stops, "\n\n".join(stops)
    assert {version.name: missing(version, clone / version.name) for version in EXPECTED} == {
        version.name: [] for version in EXPECTED
    }
