"""The shell script that hands Version 3 to rocprofv3, with a stand-in for the tool."""

import shutil

from tests.conftest import ROOT
from tests.stand_ins import Machine, value

V3 = ROOT / "version3_triton"
SCRIPT = V3 / "run_rocprof_triton.sh"


def test_rocprofv3_gets_version_3(tmp_path):
    machine = Machine(tmp_path)
    machine.tools("rocprofv3")
    machine.command("python", shutil.which("true"))
    machine.run(SCRIPT, "--profile-dir", "out", "--marker-trace", "--num-steps", "7")
    [call] = machine.calls
    options, command = call[: call.index("--")], call[call.index("--") + 1 :]
    assert "--marker-trace" in options and value(options, "-d") == "out"
    assert command[:2] == ["python", str(V3 / "tiny_llama_v3.py")] and value(command, "--num-steps") == "7"


def test_help_is_the_head_of_the_file(tmp_path):
    assert "bash run_rocprof_triton.sh [--profile-dir DIR]" in Machine(tmp_path).run(SCRIPT, "--help").stdout
