"""The sampler beside a run: the formats of three tools, what ends it, and what it leaves behind."""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import sample_gpu
from tests.conftest import V1

import pytest

SCRIPT = V1 / "sample_gpu.py"
NVIDIA = "0, 87, 412.31, 20480, 1980, 2619\n1, 0, 71.50, 4, 345, [N/A]\n"
AMD = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 96, "unit": "%"}, "umc_activity": {"value": 30, "unit": "%"}},
        "power": {"socket_power": {"value": 512, "unit": "W"}, "gfx_voltage": "N/A"},
        "clock": {
            "gfx_0": {"clk": {"value": 2098, "unit": "MHz"}, "min_clk": {"value": 500, "unit": "MHz"}},
            "mem_0": {"clk": {"value": 1300, "unit": "MHz"}, "min_clk": {"value": 900, "unit": "MHz"}},
        },
        "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 1024, "unit": "MB"}},
    }
]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch) -> Callable[..., None]:
    """tools(name, text, code=0): puts a tool that prints the text on a PATH of its own; each call is a line in `calls`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def put(name: str, text: str, code: int = 0) -> None:
        (tmp_path / "answer").write_text(text)
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n/bin/cat {tmp_path}/answer\nexit {code}\n")
        tool.chmod(0o755)

    return put


def samples(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_what_each_tool_prints_is_the_same_sample_and_what_it_leaves_out_is_empty():
    warning = "WARNING: User is missing the following required groups: render, video. Please add user to these groups.\n"
    for text in (json.dumps(AMD), json.dumps({"gpu_data": AMD}), warning + json.dumps(AMD, indent=4)):
        assert sample_gpu.amd_smi(text) == [["0", 96, 512, 1024, 2098, 1300]]
    assert sample_gpu.nvidia_smi(NVIDIA) == [["0", 87, 412.31, 20480, 1980, 2619], ["1", 0, 71.5, 4, 345, None]]
    bare = json.dumps([{"gpu": 3, "usage": "N/A", "power": {"socket_power": "N/A"}}])
    assert sample_gpu.amd_smi(bare) == [["3", None, None, None, None, None]]


@pytest.mark.parametrize("text", ["", "Unable to determine the device handle for GPU0: Unknown Error", "[]", '["N/A"]', "[{}]"])
def test_an_answer_in_another_form_is_no_sample(tools, text):
    for tool in sample_gpu.TOOLS:
        tools(tool, text)
        assert sample_gpu.read(tool) == []


def test_it_samples_until_the_command_ends(execute, tools, tmp_path):
    tools("amd-smi", json.dumps(AMD))
    waiting = f"while open('{tmp_path}/calls').read().count('called') < 6: time.sleep(0.01)"
    command = (sys.executable, "-c", f"import time\n{waiting}\nraise SystemExit(3)")
    printed = execute(SCRIPT, "--interval-ms", 20, "--output", "run.csv", "--", *command, check=3)
    rows = samples(tmp_path / "run.csv")
    assert len(rows) > 1 and {row["power_w"] for row in rows} == {"512.0"}
    times = [float(row["seconds"]) for row in rows]
    assert times == sorted(times)
    assert "GPU (amd-smi)" in printed.out and f"{len(rows)} samples in run.csv" in printed.out


def test_without_a_tool_one_line_says_so(refused, tools, tmp_path):
    tools("nvidia-smi", "no driver", 9)
    assert "none of nvidia-smi, amd-smi was found in PATH and reports a GPU" in refused(SCRIPT, "--", "true")
    tools("nvidia-smi", NVIDIA)
    assert "no command nowhere" in refused(SCRIPT, "--", "nowhere")
    assert not (tmp_path / "gpu_samples.csv").exists()


@pytest.mark.parametrize("child", [False, True], ids=["alone", "with a command"])
def test_a_signal_ends_it_and_its_command_and_the_samples_are_written(tools, tmp_path, child):
    tools("nvidia-smi", NVIDIA)
    waits = "import pathlib, time\npathlib.Path('ready').touch()\ntime.sleep(600)"
    command = ("--", sys.executable, "-c", waits) if child else ()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--interval-ms", "20", "--output", "s.csv", *command], stdout=subprocess.PIPE, text=True,
        cwd=tmp_path,
    )  # fmt: skip
    calls = tmp_path / "calls"
    while not (calls.exists() and calls.read_text().count("called") > 2) or child > (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == (128 + signal.SIGTERM if child else 0)
    assert {row["gpu"] for row in samples(tmp_path / "s.csv")} == {"0", "1"} and "GPU (nvidia-smi)" in printed
