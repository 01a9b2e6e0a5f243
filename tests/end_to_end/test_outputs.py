"""An output that is also an input is refused, and the input stays as it was."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT, TINY, V1
from tests.kernel_files import FIXTURES, write_database

import pytest

V2, V4 = ROOT / "version2_pytorch_fused", ROOT / "version4_ultra_fused"
RUN = (*TINY, "--vocab-size", "300", "--num-steps", "2", "--device", "cpu")


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def copied(source: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copy(source, path)


CONFIG = text("model: {hidden_size: 32, num_layers: 1, num_attention_heads: 4, vocab_size: 300}")
WORDS, DATABASE = text("a b\n" * 999), lambda path: write_database(path, [("kernel", 0, 9)])
TRACE, PROFILE = (
    copied(FIXTURES / "new_kernel_trace.csv"),
    copied(ROOT / "results/cpu/v1_tiny_profile.json.gz"),
)
# A script, its arguments, the input that an output would overwrite, and what writes that input.
CLASHES: list[tuple[Path, str, str, Callable[[Path], object]]] = [
    (V1 / "tiny_llama_v1.py", "--data in --metrics-out OUT", "in", WORDS),
    (V1 / "tiny_llama_v1.py", "--data synthetic --config in --metrics-out OUT", "in", CONFIG),
    (ROOT / "page.py", "in/a.json --output OUT", "in/a.json", PROFILE),
    (V2 / "analyze_kernel_launches.py", "--trace-file in --csv-out OUT", "in/a.csv", TRACE),
    (V2 / "analyze_kernel_launches.py", "--trace-file in --csv-out OUT", "in/a.db", DATABASE),
    (
        V2 / "benchmark_suite.py",
        "--models v1 --config in/benchmark.json --output-dir in",
        "in/benchmark.json",
        CONFIG,
    ),
    (
        ROOT / "decoding/generate.py",
        "--checkpoint in --metrics-out OUT",
        "in/model.safetensors",
        WORDS,
    ),
    (
        V1 / "tiny_llama_v1.py",
        "--data synthetic --config in/config.json --save-model in",
        "in/config.json",
        CONFIG,
    ),
    (
        V1 / "tiny_llama_v1.py",
        "--data synthetic --checkpoint-dir in --metrics-out OUT",
        "in/step-2/position.json",
        WORDS,
    ),
    (
        V1 / "analyze_gemm_operations.py",
        "--model-config in/gemm_analysis.json --output-dir in",
        "in/gemm_analysis.json",
        CONFIG,
    ),
    (
        V2 / "memory_bandwidth_analyzer.py",
        "--profile-data in/bandwidth.csv --output-dir in",
        "in/bandwidth.csv",
        copied(FIXTURES / "ncu_raw.csv"),
    ),
]


@pytest.mark.parametrize(
    ("script", "arguments", "name", "write"),
    CLASHES,
    ids=[f"{script.stem} {name}" for script, _, name, _ in CLASHES],
)
def test_an_input_is_not_overwritten(
    refused, tmp_path, script: Path, arguments: str, name: str, write
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path / name)
    before, run = (tmp_path / name).read_bytes(), RUN if script.stem == "tiny_llama_v1" else ()
    assert "is an input of this command: name another file" in refused(
        script, *arguments.replace("OUT", name).split(), *run
    )
    assert (tmp_path / name).read_bytes() == before


def test_a_page_takes_the_name_of_no_profile_or_trace(refused, execute, tmp_path) -> None:
    """The trace beside a profile is an input, too. A device holds no file that could be lost."""
    PROFILE(tmp_path / "profile_1.json")
    for name in ("profile_2.json", "trace_1.json"):
        PROFILE(tmp_path / name)
        message = refused(ROOT / "page.py", "profile_1.json", "--output", name)
        assert f"{name} is a profiler's: name another file" in message
    TRACE(tmp_path / "a.csv")
    assert "written: /dev/null" in execute(ROOT / "page.py", "a.csv", "--output", "/dev/null").out
    assert Path("/dev/null").is_char_device()


def test_an_output_of_the_run_before_is_no_input(execute, tmp_path) -> None:
    """The folder is searched for traces again, and the table of the run before is among its files."""
    shutil.copy(FIXTURES / "new_kernel_trace.csv", tmp_path)
    for _ in range(2):
        assert (
            "written"
            in execute(
                V2 / "analyze_kernel_launches.py", "--trace-file", ".", "--csv-out", "launches.csv"
            ).out
        )
