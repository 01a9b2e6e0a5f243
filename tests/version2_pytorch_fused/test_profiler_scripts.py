"""The shell scripts that start the vendors' profilers: command lines, exit codes, and one line
about a tool that is missing.

The tools are stand-ins on a PATH of their own, which run the command and return its exit code. One
test runs the real ncu on a GPU.
"""

import csv
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.conftest import PATHS, ROOT, TINY, V1
from tests.stand_ins import Machine, value

import pytest

V2, V3, V4 = (
    ROOT / name for name in ("version2_pytorch_fused", "version3_triton", "version4_ultra_fused")
)
ALL, ROCPROFV3, ROCPROF_SYS, ROCPROF_COMPUTE = (
    V2 / f"run_{name}.sh"
    for name in ("all_profilers", "rocprofv3", "rocprof_sys", "rocprof_compute")
)
ONE_TOOL = {
    ROCPROFV3: "rocprofv3",
    ROCPROF_SYS: "rocprof-sys-run",
    ROCPROF_COMPUTE: "rocprof-compute",
}
AMD = tuple(ONE_TOOL.values())
NVIDIA = ("nvidia-smi", "ncu", "nsys")
OF_A_VERSION = {V2 / path.name: (V2 / "tiny_llama_v2.py", tool) for path, tool in ONE_TOOL.items()}
OF_A_VERSION |= {V1 / path.name: (V1 / "tiny_llama_v1.py", tool) for path, tool in ONE_TOOL.items()}
OF_A_VERSION |= {V4 / path.name: (V4 / "tiny_llama_v4.py", tool) for path, tool in ONE_TOOL.items()}
OF_A_VERSION |= {V3 / "run_rocprof_triton.sh": (V3 / "tiny_llama_v3.py", "rocprofv3")}
script_name = {"ids": lambda path: f"{path.parent.name[:8]}-{path.stem}"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def arguments_of_script(done: subprocess.CompletedProcess) -> list[list[str]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


# One tool


@pytest.mark.parametrize("script", ONE_TOOL)
def test_missing_tool_is_named_and_skipped(machine, script):
    done = machine.run(script, "--script", machine.script)
    assert (
        done.stderr.startswith(f"{ONE_TOOL[script]} is not on PATH: skipped ")
        and done.stderr.count("\n") == 1
    )
    assert not done.stdout and list(machine.folder.iterdir()) == [machine.script]


@pytest.mark.parametrize("script", ONE_TOOL)
def test_arguments_reach_the_script_whole_and_its_code_and_output_come_back(machine, script):
    machine.tools(ONE_TOOL[script])
    given = ["--data", "my text.txt", "--num-steps", "7", "--seed=$HOME *"]
    done = machine.run(
        script,
        "--profile-dir=some where",
        *given,
        "--script",
        machine.script,
        check=7,
        SCRIPT_CODE="7",
    )
    for arguments in arguments_of_script(done):  # rocprof-compute runs it twice
        assert arguments[-len(given) :] == given
        assert Path(value(arguments, "--metrics-out")).name == "metrics.json"
    assert (machine.folder / "some where").is_dir()


@pytest.mark.parametrize("script", OF_A_VERSION, **script_name)
def test_a_tool_gets_the_version_of_its_folder_and_the_arguments(machine, script):
    version, tool = OF_A_VERSION[script]
    machine.tools(tool)
    machine.command("python", shutil.which("true"))
    machine.run(script, "--profile-dir", "out", "--num-steps", "7")
    called, *rest = machine.calls[0]
    command = rest[rest.index("--") + 1 :]
    assert (
        called == tool
        and command[:2] == ["python", str(version)]
        and value(command, "--num-steps") == "7"
    )
    assert (machine.folder / "out").is_dir()


@pytest.mark.parametrize(
    "options, flags",
    [("", {"--profile", "--trace"}), ("--output-format", {"--output-format", "proto,text,json"})],
)
def test_rocprof_sys_traces_and_profiles_in_every_release(machine, options, flags):
    machine.tools("rocprof-sys-run")
    machine.run(ROCPROF_SYS, "--script", machine.script, "--profile-dir", "out", OPTIONS=options)
    [call] = machine.calls
    assert flags < set(call) and value(call, "--output") == "out"


@pytest.mark.parametrize(
    "options, counts, roofline",
    [
        ("", {"--no-roof", "--path"}, {"--roof-only", "--device", "--path"}),
        (
            "--output-directory --overwrite --roofline-device",
            {"--no-roof", "--output-directory", "--overwrite"},
            {"--roofline", "--roofline-device", "--output-directory", "--overwrite"},
        ),
    ],
    ids=["old", "new"],
)
def test_rocprof_compute_counts_and_measures_a_roofline_in_every_release(
    machine, options, counts, roofline
):
    machine.tools("rocprof-compute")
    (machine.folder / "sub").mkdir()
    machine.run(
        ROCPROF_COMPUTE, "--script", machine.script, "--profile-dir", "sub/../out", OPTIONS=options
    )
    for call, flags, name in zip(
        machine.calls, (counts, roofline), ("counters", "roofline"), strict=True
    ):
        own = call[: call.index("--")]
        assert {word for word in own if word.startswith("--")} == flags and value(own, "-n") == name
        assert str(machine.folder / "out" / name) in own, (
            "a path without .., which the tool does not take"
        )


# All tools


def test_deepspeed_counts_after_pytorchs_profiler(machine):
    machine.tools("deepspeed", *AMD)  # the command that comes with the package; it is not run
    done = machine.run(
        ALL,
        "--profile-dir",
        "out",
        "--batch-size",
        "8",
        "--data",
        "a b",
        "--script",
        machine.script,
    )
    profiled, counted = arguments_of_script(done)
    assert "--flops-dir" not in profiled and counted[-2:] == ["--flops-dir", "out/deepspeed"]
    assert value(counted, "--num-steps") == "10" and "--enable-pytorch-profiler" not in counted
    assert (
        value(counted, "--metrics-out") == "out/deepspeed/metrics.json"
        and value(counted, "--data") == "a b"
    )
    assert (machine.folder / "out/deepspeed").is_dir() and not machine.calls


def test_all_amd_tools_are_run_and_the_first_failure_counts(machine):
    machine.tools(*AMD)
    given = ("--batch-size", "8", "--data", "a b")
    done = machine.run(
        ALL,
        *given,
        "--enable-rocm-tools",
        "--profile-dir",
        "out",
        "--script",
        machine.script,
        check=4,
        FAIL_rocprof_sys_run="4",
        FAIL_rocprof_compute="5",
    )
    assert machine.called == ["rocprofv3", "rocprof-sys-run", "rocprof-compute", "rocprof-compute"]
    assert value(machine.calls[0], "-d") == "out/rocprofv3" and "--marker-trace" in machine.calls[0]
    assert "--stats" in machine.calls[0] and value(machine.calls[0], "--output-format") == "csv"
    assert value(machine.calls[1], "--output") == "out/rocprof_sys"
    assert (
        "rocprof-sys-run failed with exit code 4" in done.stderr
        and "rocprof-compute failed with exit code 5" in done.stderr
    )
    for call in (*machine.calls, *arguments_of_script(done)):
        assert value(call, "--data") == "a b" and "--enable-rocm-tools" not in call


def test_a_script_that_fails_by_itself_is_not_profiled_further(machine):
    machine.tools(*AMD)
    machine.run(ALL, "--enable-rocm-tools", "--script", machine.script, check=2, SCRIPT_CODE="2")
    assert not machine.calls


def test_on_nvidia_the_twins_are_run(machine):
    machine.tools(*NVIDIA, *AMD)
    given = ("--seed", "3", "--data", "a b")
    done = machine.run(
        ALL, "--enable-rocm-tools", "--profile-dir", "out", "--script", machine.script, *given
    )
    assert machine.called == ["nvidia-smi", "ncu", "nsys", "nsys"]
    _, ncu, nsys, export = machine.calls
    assert (
        value(ncu, "--clock-control") == "none"
        and value(ncu, "--log-file") == "out/ncu/kernels.csv"
    )
    assert "gpu__time_duration.sum" in value(ncu, "--metrics").split(",")
    assert int(value(ncu, "--launch-count")) > 0 and value(ncu, "--num-steps") == "1"
    assert {"--output=out/nsys/timeline", "--cuda-graph-trace=node"} < set(nsys), (
        "the kernels of a captured step, too"
    )
    assert {"export", "--type=sqlite", "out/nsys/timeline.nsys-rep"} < set(export)
    assert all(value(arguments, "--data") == "a b" for arguments in arguments_of_script(done))


@pytest.mark.parametrize("tool", ("none", "rocprof-compute", "ncu"))
def test_ctrl_c_ends_everything(machine, tool):
    machine.tools(*(NVIDIA if tool == "ncu" else AMD))
    process = subprocess.Popen(
        ["bash", str(ALL), "--enable-rocm-tools", "--script", str(machine.script)],
        cwd=machine.folder,
        env=machine.environment | {"WAITS_UNDER": tool},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.stdout.readline() != "waiting\n":
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert machine.called[-1:] == ([] if tool == "none" else [tool])
    assert machine.called.count("rocprof-compute") == (1 if tool == "rocprof-compute" else 0)


# Bad input


@pytest.mark.parametrize("script", (ALL, ROCPROFV3))
@pytest.mark.parametrize(
    "arguments, message",
    (
        (
            ["--script", "no_such.py"],
            "error: there is no script 'no_such.py': name one with --script FILE.py",
        ),
        (["--profile-dir", "--marker-trace"], "error: --profile-dir needs a folder"),
    ),
)
def test_bad_input_is_one_line(machine, script, arguments, message):
    machine.tools(*AMD)
    done = machine.run(script, *arguments, check=2)
    assert done.stderr == message + "\n" and not done.stdout and not machine.calls


# Real runs


@pytest.mark.gpu
@pytest.mark.skipif(
    not shutil.which("ncu") or not shutil.which("nvidia-smi"),
    reason="needs ncu and an NVIDIA driver",
)
def test_ncu_measures_the_kernels_of_a_step(machine):
    machine.environment["PATH"] += os.pathsep + os.environ["PATH"]
    small = ("--script", V1 / "tiny_llama_v1.py", *TINY, "--num-layers", 1, "--data", "synthetic")
    flags = ("--enable-rocm-tools", "--profile-dir", "out", *small)
    done = machine.run(ALL, *flags, check=None, PYTHONPATH=PATHS)
    text = (machine.folder / "out/ncu/kernels.csv").read_text()
    if "ERR_NVGPUCTRPERM" in text:
        pytest.skip("needs a driver that lets this user read counters: MACHINES.md")
    assert done.returncode == 0, done.stderr
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    units, *kernels = csv.DictReader(lines)
    assert (
        units["gpu__time_duration.sum"] in ("ns", "nsecond")
        and units["dram__bytes_read.sum"] == "byte"
    )
    assert len(kernels) > 100
    assert all(float(kernel["gpu__time_duration.sum"].replace(",", "")) > 0 for kernel in kernels)
    assert any(
        "attention" in text
        for kernel in kernels
        for column, text in kernel.items()
        if "Push/Pop_Range" in column
    )
