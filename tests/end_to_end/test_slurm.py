"""The batch scripts of Slurm, with stand-ins for Slurm's commands."""

import os
import subprocess
from pathlib import Path

from tests.conftest import ROOT

import pytest
from torch.distributed.run import get_args_parser

SCRIPT, ONE_GPU = ROOT / "slurm/train.sbatch", ROOT / "slurm/one_gpu.sbatch"
JOB = {
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[3-4]",
}


def submit(folder: Path, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess:
    for name, says in (("scontrol", 'printf "node3\\nnode4\\n"'), ("srun", 'printf "%s\\n" "$@"')):
        (folder / name).write_text(f"#!/bin/sh\n{says}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | JOB | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, env=environment
    )


def test_torchrun_is_started_once_a_node_and_gets_the_script_and_its_flags(tmp_path):
    done = submit(
        tmp_path, "tiny_llama_v2.py", "--parallel", "fsdp", "--metrics-out", "a name.json"
    )
    flags = done.stdout.splitlines()
    own = get_args_parser().parse_args(flags[flags.index("torch.distributed.run") + 1 :])
    assert (own.nnodes, own.nproc_per_node, own.rdzv_endpoint, own.rdzv_backend) == (
        "2",
        "4",
        "node3:29500",
        "c10d",
    )
    assert own.training_script == "tiny_llama_v2.py"
    assert own.training_script_args == ["--parallel", "fsdp", "--metrics-out", "a name.json"]


@pytest.mark.parametrize("script", [SCRIPT, ONE_GPU], ids=lambda path: path.name)
def test_without_a_script_it_says_how_it_is_used(tmp_path, script):
    done = submit(tmp_path, script=script)
    assert (done.returncode, done.stderr.count("\n")) == (
        2,
        1,
    ) and f"slurm/{script.name} SCRIPT" in done.stderr


@pytest.mark.parametrize(
    "name, interpreter", [("tiny_llama_v1.py", "python"), ("run_all_profilers.sh", "bash")]
)
def test_one_attendee_gets_one_gpu(tmp_path, name, interpreter):
    flags = submit(
        tmp_path, name, "--metrics-out", "a name.json", script=ONE_GPU
    ).stdout.splitlines()
    assert flags[flags.index("--gpus") + 1] == "1"
    assert flags[-4:] == [interpreter, name, "--metrics-out", "a name.json"]
