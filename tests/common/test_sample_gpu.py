"""The sampler beside a run: the formats of three tools, what ends it, and what it leaves behind."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import sample_gpu
from tests.conftest import PATHS, V1

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
ROCM = {
    "card0": {
        "GPU use (%)": "96", "Current Socket Graphics Package Power (W)": "512.0", "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "1073741824", "sclk clock speed:": "(2098Mhz)", "mclk clock speed:": "(1300Mhz)",
    },
    "system": {"Driver version": "6.12.12"},
}  # fmt: skip
EXPECTED = {"0": dict(zip(sample_gpu.MEASURED, (96, 512, 1024, 2098, 1300), strict=True))}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """tools(name, text, code=0) puts a program into an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, text: str = "", code: int = 0) -> Path:
        quoted = text.replace("'", "'\\''")
        (folder / name).write_text(f"#!/bin/sh\necho called >> {folder}/calls\nprintf '%s' '{quoted}'\nexit {code}\n")
        (folder / name).chmod(0o755)
        return folder / name

    return make


def samples(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_what_each_tool_prints_is_the_same_sample_and_what_it_leaves_out_is_empty():
    assert sample_gpu.amd_smi(json.dumps(AMD)) == sample_gpu.amd_smi(json.dumps({"gpu_data": AMD})) == EXPECTED
    assert sample_gpu.rocm_smi(json.dumps(ROCM)) == EXPECTED
    found = sample_gpu.nvidia_smi(NVIDIA)
    assert list(found["0"].values()) == [87, 412.31, 20480, 1980, 2619]
    assert found["1"]["memory_clock_mhz"] is None and found["1"]["power_w"] == 71.5

    bare = sample_gpu.amd_smi(json.dumps([{"gpu": 3, "usage": "N/A", "power": {"socket_power": "N/A"}}]))
    assert bare == {"3": dict.fromkeys(sample_gpu.MEASURED)}
    assert sample_gpu.rocm_smi('{"card2": {"Average Graphics Package Power (W)": "90.0"}}')["2"]["power_w"] == 90


@pytest.mark.parametrize("indent", [None, 4])
def test_a_warning_above_the_answer_is_left_out(indent):
    warning = "WARNING: User is missing the following required groups: render, video. Please add user to these groups.\n"
    assert sample_gpu.amd_smi(warning + json.dumps(AMD, indent=indent)) == EXPECTED
    assert sample_gpu.rocm_smi(f"\n{warning}\n{json.dumps(ROCM, indent=indent)}") == EXPECTED


@pytest.mark.parametrize("text", ["", "Unable to determine the device handle for GPU0: Unknown Error", "[]", '["N/A"]', "[{}]"])
def test_an_answer_in_another_form_is_no_sample(tools, text):
    for tool in sample_gpu.TOOLS:
        tools(tool, text)
        assert sample_gpu.read(tool) == {}


@pytest.mark.parametrize("name, text", [("amd-smi", json.dumps(AMD)), ("rocm-smi", json.dumps(ROCM))])
def test_it_samples_until_the_command_ends(execute, tools, tmp_path, name, text):
    tools("nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
    calls = tools(name, text).with_name("calls")
    waiting = f"while open({str(calls)!r}).read().count('called') < 6: time.sleep(0.01)"
    command = (sys.executable, "-c", f"import time\n{waiting}\nraise SystemExit(3)")
    printed = execute(SCRIPT, "--interval-ms", 20, "--output", "run.csv", "--", *command, check=3)
    rows = samples(tmp_path / "run.csv")
    assert len(rows) > 1 and {row["power_w"] for row in rows} == {"512.0"}
    times = [float(row["seconds"]) for row in rows]
    assert times == sorted(times)
    assert f"GPU ({name})" in printed.out and f"{len(rows)} samples in run.csv" in printed.out


def test_a_tool_that_stops_answering_gives_no_more_samples(execute, tools, tmp_path, monkeypatch):
    tool, calls, read, reads = tools("nvidia-smi"), tmp_path / "bin/calls", sample_gpu.read, []
    late = f"[ ! -e {tmp_path}/stuck ] || {{ /bin/sleep 10; used=88; }}"
    tool.write_text(f'#!/bin/sh\necho called >> {calls}\nused=87\n{late}\necho "0, $used, 412.31, 20480, 1980, 2619"\n')

    def stuck_from_the_fourth_on(name: str) -> dict:
        reads.append(name)
        if len(reads) == 4:
            (tmp_path / "stuck").touch()
            monkeypatch.setattr(sample_gpu, "ANSWER", 0.2)
        return read(name)

    monkeypatch.setattr(sample_gpu, "ANSWER", 300.0)
    monkeypatch.setattr(sample_gpu, "read", stuck_from_the_fourth_on)
    command = f"import time\nwhile open({str(calls)!r}).read().count('called') < 6: time.sleep(0.01)"
    execute(SCRIPT, "--interval-ms", 20, "--output", "run.csv", "--", sys.executable, "-c", command)
    assert {row["utilization_percent"] for row in samples(tmp_path / "run.csv")} == {"87.0"}


def test_the_summary_has_the_extremes_of_each_gpu():
    rows = [
        [0.0, "0", 10.0, 100.0, 5.0, None, 1.0], [1.0, "0", 90.0, 300.0, 5.0, None, 1.0], [2.0, "0", 80.0, 110.0, 6.0, None, 1.0],
    ]  # fmt: skip
    assert sample_gpu.summary(rows) == [
        ["0", "utilization_percent", 10, 80, 90, 3], ["0", "power_w", 100, 110, 300, 3], ["0", "memory_mib", 5, 5, 6, 3],
        ["0", "memory_clock_mhz", 1, 1, 1, 3],
    ]  # fmt: skip


def test_without_a_tool_one_line_says_so(refused, tools, tmp_path):
    assert "none of nvidia-smi, amd-smi, rocm-smi was found" in refused(SCRIPT, "--", "true")
    tools("nvidia-smi", "no driver", 9)
    assert "reports a GPU" in refused(SCRIPT)
    tools("nvidia-smi", NVIDIA)
    assert "no command nowhere" in refused(SCRIPT, "--", "nowhere")
    assert not (tmp_path / "gpu_samples.csv").exists()


def sampling(tmp_path: Path, interval_ms: int, *command: str) -> subprocess.Popen:
    """The script, once it has sampled and the command has made the file `ready`."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--interval-ms", str(interval_ms), "--output", str(tmp_path / "s.csv"), *command],
        env=os.environ | {"PYTHONPATH": PATHS}, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    calls = tmp_path / "bin/calls"
    while not (calls.exists() and calls.read_text().count("called") > 1 and ((tmp_path / "ready").exists() or not command)):
        assert process.poll() is None
        time.sleep(0.02)
    return process


READY = "import pathlib, signal, time\n{}\npathlib.Path('ready').touch()\ntime.sleep(600)"


@pytest.mark.parametrize("child, interval_ms", [(False, 600_000), (True, 20)], ids=["alone", "with a command"])
def test_a_signal_ends_it_and_its_command_and_the_samples_are_written(tools, tmp_path, child, interval_ms):
    tools("nvidia-smi", NVIDIA)
    process = sampling(tmp_path, interval_ms, *(("--", sys.executable, "-c", READY.format("")) if child else ()))
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == (128 + signal.SIGTERM if child else 0)
    assert {row["gpu"] for row in samples(tmp_path / "s.csv")} == {"0", "1"} and "GPU (nvidia-smi)" in printed


def test_a_second_signal_ends_the_wait_for_a_command_and_reaches_it(tools, tmp_path):
    tools("nvidia-smi", NVIDIA)
    heard = "signal.signal(signal.SIGINT, lambda *_: pathlib.Path('heard').touch())"
    process = sampling(tmp_path, 20, "--", sys.executable, "-c", READY.format(heard))
    process.send_signal(signal.SIGINT)
    while not (tmp_path / "heard").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # ends the command as well, which holds the other end of standard output
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert {row["gpu"] for row in samples(tmp_path / "s.csv")} == {"0", "1"}
