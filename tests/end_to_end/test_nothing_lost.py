"""What a script has measured is kept however it ends: by a signal or a full disk.

Scripts run in this process and are ended in the middle of their work. What takes long, such as a
trial in a process of its own, is made up; one search with real trials is stopped, too.
"""

import errno
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from common import cli, timing
from common import device as devices
from studies import ablation, gemm, job_runner
from tests import pages, records
from tests.conftest import PATHS, ROOT, TINY, V1
from tracepage import files
from version3_triton import kernel_cases, kernels

import pytest

V2 = ROOT / "version2_pytorch_fused"
QUICK = (
    *TINY,
    "--data",
    "synthetic",
    "--num-steps",
    "4",
    "--warmup-steps",
    "1",
    "--log-every",
    "1",
    "--metrics-out",
    "out.json",
)
TIMES = {"median": 1.0, "p20": 1.0, "p80": 1.0, "count": 3}
SMALL = "model: {hidden_size: 32, num_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 50}\n"
SMALL += "training: {batch_size: 2, sequence_length: 9}\n"
HEADER = {key: records.record()[key] for key in ("device", "environment")}


def process(work: Callable, device: str, timeout: int | None = None) -> dict[str, Any]:
    """A process of the benchmark, or a trial of the search for a batch size."""
    common = {"precision": {"compute": "fp32"}, "memory_kind": "process RSS", "settings": {}}
    run = {"step_ms": TIMES, "peak_mib": 1.0, "kind": "process RSS", "common": common}
    return {"status": "ok", "reason": None, "found": run} | HEADER


def timed(function: Callable, device: Any, warmup: int = 3, iterations: int = 20) -> list[float]:
    function()
    return [1.0] * iterations


class Script(NamedTuple):
    """A script, its result file, how many rows that holds, and the function in whose call number
    `call` the script is ended.
    """

    path: Path
    arguments: tuple[object, ...]
    file: str
    rows: Callable[[dict], int]
    function: tuple[object, str]
    call: int
    stand_in: Callable | None = None


def version(path: Path) -> Script:
    """Ended in the second of four steps."""
    return Script(
        path,
        QUICK,
        "out.json",
        lambda record: len(record["loss"]["all"]),
        (timing.Clock, "mark"),
        4,
    )


SCRIPTS = {
    path.stem: version(path) for path in sorted(ROOT.glob("version*_*/tiny_llama_v*.py"))
} | {
    "benchmark": Script(
        V2 / "benchmark_suite.py",
        ("--models", "v1,v2", "--batch-sizes", "2", "--seq-lengths", "8", "--metrics", "memory"),
        "benchmark_suite/benchmark.json",
        lambda found: sum(len(cell["runs"]) for cell in found["cells"]),
        (job_runner, "in_a_process"),
        3,
        process,
    ),
    "batch size": Script(
        V2 / "optimize_batch_size.py",
        ("--max-batch-size", "16"),
        "batch_size_search/batch_search.json",
        lambda found: len(found["trials"]),
        (job_runner, "in_a_process"),
        3,
        process,
    ),
    "ablation": Script(
        V2 / "fusion_ablation_study.py",
        ("--config", "small.yaml", "--rounds", "3"),
        "fusion_ablation/fusion_ablation.json",
        # in the second round over two combinations
        lambda found: found["rounds"],
        (ablation, "benchmark"),
        3,
        timed,
    ),
    "matrix products": Script(
        V1 / "analyze_gemm_operations.py",
        ("--model-config", "small.yaml", "--batch-sizes", "2,3", "--sequence-lengths", "8"),
        "gemm_analysis/gemm_analysis.json",
        lambda found: len(found["gemms"]),
        (gemm, "time_product"),
        36,
        lambda *_: [1.0],
    ),
    "kernels": Script(
        ROOT / "version3_triton/benchmark_kernels.py",
        (
            "--config",
            "small.yaml",
            "--operations",
            "rms_norm",
            "apply_rope",
            "--metrics-out",
            "out.json",
        ),
        "out.json",
        lambda found: len(found["rows"]),
        (kernel_cases, "benchmark"),
        6,
        timed,
    ),
}


class Reached(Exception):
    """Holds the function that `cli.command` was to run."""


@pytest.mark.parametrize("script", pages.SCRIPTS, ids=str)
def test_every_script_has_the_exit_codes_of_the_readme(monkeypatch, script):
    """They all end through `cli.command`, which has its own test."""

    def command(main: Callable) -> None:
        raise Reached(main)

    monkeypatch.setattr(cli, "command", command)
    monkeypatch.setattr("sys.argv", [str(script)])
    with pytest.raises(Reached):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.fixture
def ended(monkeypatch, execute, known_ceilings, tmp_path) -> Iterator[Callable[..., str]]:
    """ended(script, how, check): runs it, calls how() in the middle; what it printed, after a check
    of its exit code.
    """
    stopping = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    # nohup and a shell's & ignore some
    before = {kind: signal.signal(kind, handler) for kind, handler in stopping.items()}
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setattr(devices, "compile_problem", lambda device: "torch.compile is left out")
    monkeypatch.setattr(ablation, "combinations", lambda *_: [(False,) * 5, (True, *(False,) * 4)])
    monkeypatch.setattr(ablation, "count", lambda *_: SimpleNamespace(are_operators=True, notes=[]))
    monkeypatch.setattr(ablation, "launches_per_step", lambda counted: 1.0)
    monkeypatch.setattr(kernels, "INTERPRETED", False)

    def run(script: Script, how: Callable[[], object], check: int) -> str:
        owner, name = script.function
        real, calls = script.stand_in or getattr(owner, name), []

        def counted(*arguments, **options):
            calls.append(name)
            if len(calls) == script.call:
                how()
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)
        printed = execute(script.path, "--device", "cpu", *script.arguments, check=check)
        assert len(calls) >= script.call, "it was ended in the middle"
        return f"{printed.out}\n{printed.err}"

    yield run
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, signal.SIGINT) for name in SCRIPTS),
        *(("tiny_llama_v1", kind) for kind in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal(ended, tmp_path, name, kind):
    """All three become one exception, in `common.signals`."""
    script = SCRIPTS[name]
    ended(script, lambda: signal.raise_signal(kind), 128 + kind)
    assert script.rows(json.loads((tmp_path / script.file).read_text())) >= 1


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_full_disk(ended, monkeypatch, script):
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    said = ended(script, lambda: monkeypatch.setattr(files, "write_bytes", full), 1)
    [printed] = [line for line in said.splitlines() if line.startswith("{")]
    assert script.rows(json.loads(printed)) >= 1
    assert f"error: cannot write {script.file} (--" in said and "No space left on device" in said


def test_a_search_with_real_trials_stops_in_the_middle_of_one(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    command = [
        sys.executable,
        V2 / "optimize_batch_size.py",
        "--config",
        "small.yaml",
        "--optimization-target",
        "memory",
    ]
    environment = os.environ | {
        "PYTHONPATH": PATHS,
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
    }
    search = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert search.stdout.readline().startswith("batch size     1")
    search.send_signal(signal.SIGTERM)
    said, complained = search.communicate(timeout=300)
    assert search.returncode == 128 + signal.SIGTERM and "the search was interrupted" in said, (
        complained
    )
    assert (
        len(json.loads((tmp_path / "batch_size_search/batch_search.json").read_text())["trials"])
        >= 1
    )
