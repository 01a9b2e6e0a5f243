"""The shell scripts that hand Version 4 to the vendors' profilers, with stand-ins for the tools."""

import shutil
from pathlib import Path

from tests.conftest import ROOT
from tests.stand_ins import Machine, value

import pytest

V4 = ROOT / "version4_ultra_fused"
VERSION = ["python", str(V4 / "tiny_llama_v4.py")]
TOOLS = {"rocprofv3": "rocprofv3", "rocprof_sys": "rocprof-sys-run", "rocprof_compute": "rocprof-compute"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """`python` does nothing, successfully."""
    machine = Machine(tmp_path)
    machine.tools(*TOOLS.values())
    machine.command("python", shutil.which("true"))
    return machine


@pytest.mark.parametrize("name, tool", TOOLS.items(), ids=TOOLS)
def test_a_tool_gets_version_4_and_its_arguments(machine, name, tool):
    machine.run(V4 / f"run_{name}.sh", "--profile-dir", "out", "--num-steps", "7", "--no-capture-step")
    called, *rest = machine.calls[0]
    command = rest[rest.index("--") + 1 :]
    assert called == tool and command[:2] == VERSION and command[-1] == "--no-capture-step"
    assert value(command, "--num-steps") == "7" and (machine.folder / "out").is_dir()


def test_all_tools_get_version_4(machine):
    machine.run(V4 / "run_all_profilers.sh", "--enable-rocm-tools", "--profile-dir", "out", "--num-steps", "7")
    assert set(machine.called) == set(TOOLS.values())
    for _, *rest in machine.calls:
        command = rest[rest.index("--") + 1 :]
        assert command[:2] == VERSION and value(command, "--num-steps") == "7"


def test_nsys_sees_the_kernels_of_a_captured_step(machine):
    machine.tools("nvidia-smi", "nsys")
    machine.run(V4 / "run_all_profilers.sh", "--enable-rocm-tools")
    [nsys] = [call for call in machine.calls if call[0] == "nsys"]
    assert "--cuda-graph-trace=node" in nsys and VERSION[1] in nsys


@pytest.mark.parametrize("name", [*TOOLS, "all_profilers"])
def test_help_is_the_head_of_the_file(machine, name):
    shown = machine.run(V4 / f"run_{name}.sh", "--help").stdout
    assert f"bash run_{name}.sh [--profile-dir DIR]" in shown and "#" not in shown and not machine.calls
