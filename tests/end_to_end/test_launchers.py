"""What starts a version on several nodes, with stand-ins for the launchers' commands. test_distributed.py runs a job of two nodes."""

import os
import subprocess
from argparse import Namespace
from pathlib import Path

from common import cli
from studies import version_files
from tests.conftest import ROOT, finished
from version2_pytorch_fused import tiny_llama_v2

import pytest
import yaml
from torch.distributed.run import get_args_parser

SCRIPT, ONE_GPU = ROOT / "slurm/train.sbatch", ROOT / "slurm/one_gpu.sbatch"
PRINT = 'printf "%s\\n" "$@"'
STAND_INS = {
    "scontrol": 'printf "node3\\nnode4\\n"',
    "srun": PRINT,
    "torchrun": PRINT,
    "ip": 'test "$6" = ib0 && echo "3: $6    inet 10.0.0.3/24 brd 10.0.0.255 scope global $6"',
}
JOB = {
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[3-4]",
}


def environment(folder: Path, **variables: str) -> dict[str, str]:
    for name, says in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{says}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables


def submit(
    folder: Path, *arguments: str, script: Path = SCRIPT, **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        env=environment(folder, **JOB | variables),
    )


def torchrun_options(*arguments: str) -> Namespace:
    return get_args_parser().parse_args(arguments)


def slurm_options(folder: Path, *arguments: str, **variables: str) -> Namespace:
    words = submit(folder, *arguments, **variables).stdout.splitlines()
    return torchrun_options(*words[words.index("torchrun") + 1 :])


def test_slurm_starts_torchrun_once_a_node_with_the_script_and_its_flags(tmp_path):
    flags = ["--parallel", "fsdp", "--metrics-out", "a name.json"]
    options = slurm_options(tmp_path, "tiny_llama_v2.py", *flags)
    assert (options.nnodes, options.nproc_per_node, options.master_addr) == ("2", "4", "node3")
    assert (options.training_script, options.training_script_args) == ("tiny_llama_v2.py", flags)


def test_jobs_of_slurm_meet_at_ports_of_their_own(tmp_path):
    def port(**variables: str) -> int:
        return slurm_options(tmp_path, "tiny_llama_v2.py", **variables).master_port

    assert port() == 20007 and port(SLURM_JOB_ID="1234567") == 24567
    assert port(PORT="29500") == 29500


def test_nodes_of_slurm_can_meet_by_the_address_of_a_network_card(tmp_path):
    assert slurm_options(tmp_path, "script.py", INTERFACE="ib0").master_addr == "10.0.0.3"
    assert submit(tmp_path, "script.py", INTERFACE="none").returncode == 1


def skypilot_options(folder: Path) -> Namespace:
    """What the second of two nodes starts."""
    task = yaml.safe_load((ROOT / "recipes/skypilot.yaml").read_text())
    assert {"workdir", "num_nodes", "resources", "setup", "run"} <= set(task)
    activate = folder / ".venv/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    variables = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.3\n10.0.0.4",
    }
    done = finished(["bash", "-c", task["run"]], folder, environment(folder, **variables))
    return torchrun_options(*done.stdout.splitlines())


def kubeflow_options(monkeypatch) -> Namespace:
    """What the second of two nodes starts: Trainer sets variables that torchrun reads."""
    job = yaml.safe_load((ROOT / "recipes/trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"] and trainer["image"]
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    variables = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": gpus, "NODE_RANK": 1}
    for name, value in (variables | {"MASTER_ADDR": "10.0.0.3", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    return torchrun_options(*trainer["args"])


def test_skypilot_and_kubeflow_start_one_script_alike(tmp_path, monkeypatch):
    skypilot = skypilot_options(tmp_path)
    kubeflow = kubeflow_options(monkeypatch)
    for options in (skypilot, kubeflow):
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
        assert (options.master_addr, options.master_port) == ("10.0.0.3", 29500)
        assert options.training_script == "version2_pytorch_fused/tiny_llama_v2.py"
    parser = version_files.run_parser(tiny_llama_v2, None)
    first = cli.parse(parser, skypilot.training_script_args)
    assert first == cli.parse(parser, kubeflow.training_script_args)
    assert first.parallel == "fsdp"


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
