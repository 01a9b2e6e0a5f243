"""Preflight on machines of all kinds, made of stand-ins: what it finds, what it says of what is missing, and the exit code."""

import importlib.util
import os
import platform
import socket
import subprocess
import sys
from collections import namedtuple

from common import cli, data, preflight
from common.errors import UsageError
from common.files import read_json
from common.preflight import Check
from tests.conftest import needs_interpreter
from tests.stand_ins import Machine

import numpy
import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    """A CPU without driver, tools and caches of compilers; compilers answer at once."""
    result = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(result.bin))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    for name in ("KFD", "RENDER_NODES", "NVIDIA_PARAMETERS", "STATUS"):
        monkeypatch.setattr(preflight, name, tmp_path / name)
    monkeypatch.setattr(preflight.devices, "compile_problem", lambda _: None)
    monkeypatch.setattr(preflight, "triton", lambda _: Check("triton", "3.7.1"))
    monkeypatch.setattr(preflight, "text", lambda: Check("text", "1,000 tokens"))
    for name in preflight.SLOWING:
        monkeypatch.delenv(name, raising=False)
    return result


def flight(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["preflight", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.command(preflight.main)
    return ended.value.code


def test_a_laptop_is_ready_for_version_1(machine, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("AMD_LOG_LEVEL", "1")  # which limits every part
    assert flight(monkeypatch, "--json", tmp_path / "preflight.json") == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\nVersion 1 can be run\n")
    found = read_json(tmp_path / "preflight.json", preflight.SCHEMA)
    states = {row["part"]: row["state"] for row in found["parts"]}
    assert states.keys() == preflight.PARTS.keys() and states["V1"] == states["V3"] == "limited"
    lines = printed.splitlines()
    for check in found["checks"]:
        [line] = [line for line in lines if line.split()[1 : 1 + len(check["name"].split())] == check["name"].split()][:1]
        assert line.split()[0] == ("ok" if check["ok"] else "missing")
        assert check["ok"] == (not check["without"]) == (not check["mend"])


def test_without_a_package_version_1_is_not_ready(machine, monkeypatch, capsys):
    assert flight(monkeypatch, "--json", machine.script / "preflight.json") == 2
    assert capsys.readouterr().out == "", "a result that cannot be written is refused before any check"
    real = preflight.version_of
    monkeypatch.setattr(preflight, "version_of", lambda name: None if name == "tokenizers" else real(name))
    assert flight(monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "missing  packages         no tokenizers; then no script runs; to mend it: run `make setup`" in printed
    assert printed.endswith("Version 1 can't be run: mend what is missing for it first\n")


@pytest.mark.parametrize("maker", ["amd", "nvidia"])
def test_each_part_names_checks_that_exist(machine, monkeypatch, maker):
    monkeypatch.setattr(preflight, "vendor", lambda: maker)
    known = {check.name for check in preflight.checks(CPU)} | {"GPU memory", "GPU formats", "products", "graphs"}
    known |= {"permissions", "counters"}
    known |= {name for tools in preflight.TOOLS.values() for name in tools}
    assert {name for needed, wanted in preflight.PARTS.values() for name in (*needed, *wanted)} <= known


@pytest.mark.parametrize("missing, expected", [
    ([], dict.fromkeys(preflight.PARTS, "ready")),
    (["training"], dict.fromkeys(preflight.PARTS, "not")),
    (["torch"], dict.fromkeys(preflight.PARTS, "limited")),
    (["triton"], {"V1": "ready", "V2": "ready", "V3": "not", "V4": "not", "performance debugging": "limited"}),
    (["processes"], {"V1": "ready", "several processes": "not"}),
    (["ncu"], {"V1": "ready", "vendor profilers": "limited"}),
])  # fmt: skip
def test_what_a_part_needs_and_what_limits_it(missing, expected):
    states = preflight.parts([Check("disk", "there"), *(Check(name, "gone", "it fails", "buy one") for name in missing)])
    assert expected.items() <= {name: state for name, (state, _) in states.items()}.items()
    assert all(lacks == [name for name in missing if state != "ready"] for state, lacks in states.values())


@pytest.mark.parametrize(
    "version, fits", [("2.10.1", False), ("2.11.0a0+git1234567", True), ("2.15.0+rocm7.2", True), ("2.16.0", False)]
)
def test_the_version_of_torch(monkeypatch, version, fits):
    monkeypatch.setattr(torch, "__version__", version)
    check = preflight.pytorch()
    assert check.ok == fits and version in check.found


# --------------------------------------------------------------------------------------------------- why there is no GPU


@pytest.mark.parametrize("system, present, build, mend", [
    ("Linux", "", None, "nothing has to be done"),
    ("Darwin", "", None, "nothing has to be done"),
    ("Linux", "amd", None, "built for CPUs: run `make clean`, then `make setup`, with TORCH_BUILD=rocm"),
    ("Linux", "amd", "cuda", "built for nvidia: run `make clean`, then `make setup`, with TORCH_BUILD=rocm"),
    ("Linux", "amd", "hip", "check driver, permissions, and the variables"),
    ("Linux", "nvidia", None, "run `make clean`, then `make setup`"),
    ("Linux", "nvidia", "cuda", "check driver, permissions, and the variables"),
])  # fmt: skip
def test_a_gpu_that_pytorch_does_not_see(machine, monkeypatch, system, present, build, mend):
    monkeypatch.setattr(platform, "system", lambda: system)
    if present == "amd":
        preflight.KFD.touch()
    elif present:
        machine.tools("nvidia-smi")
    if build:
        monkeypatch.setattr(torch.version, build, "7.2")
    check = preflight.gpu(CPU)
    assert not check.ok and mend in check.mend


def test_a_device_that_computes_nothing_and_a_compiler_that_is_missing(monkeypatch):
    check = preflight.training(torch.device("meta"))
    assert not check.ok and "no version trains" in check.without and preflight.training(CPU).ok
    monkeypatch.setattr(preflight.devices, "compile_problem", lambda _: "torch.compile does not work here: no g++")
    assert not preflight.compiler(CPU).ok and "g++" in preflight.compiler(CPU).mend


def test_a_gpu_that_others_use(monkeypatch):
    monkeypatch.setattr(preflight.devices, "free_memory", lambda _: (70 * 2**30, 80 * 2**30))
    assert preflight.gpu_memory(CPU).ok
    monkeypatch.setattr(preflight.devices, "free_memory", lambda _: (30 * 2**30, 80 * 2**30))
    check = preflight.gpu_memory(CPU)
    assert check.found == "30.0 of 80.0 GiB free" and "CUDA_VISIBLE_DEVICES" in check.mend


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profiler_that_sees_no_kernels(monkeypatch):
    assert preflight.profiler(CPU).found == "torch.profiler sees operators"
    monkeypatch.setattr(preflight.devices, "is_gpu", lambda _: True)
    monkeypatch.setattr(preflight.devices, "synchronize", lambda _: None)
    assert preflight.profiler(CPU).found == "torch.profiler sees no kernels"


def test_attention_that_no_fused_kernel_computes(machine, monkeypatch):
    """Not on ROCm, of which the flight below tells."""
    assert preflight.attention(CPU).found == "PyTorch takes FLASH_ATTENTION"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 0)
    assert preflight.attention(CPU).ok, "on a CPU nothing is lost"
    monkeypatch.setattr(preflight.devices, "is_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _: True)
    check = preflight.attention(CPU)
    assert check.found == "PyTorch takes MATH" and "S x S" in check.without and check.mend == "none on this GPU"


@pytest.mark.parametrize("answer, found", [
    (subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: HIP error\n"), "RuntimeError: HIP error"),
    (subprocess.TimeoutExpired([], 60), "bf16 takes more than 60 s"),
])  # fmt: skip
def test_products_that_a_library_searches_for_minutes(monkeypatch, answer, found):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preflight.subprocess, "run", run)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    check = preflight.products()
    assert not check.ok and check.found == found and "TORCH_BLAS_PREFER_HIPBLASLT=0" in check.mend


@pytest.mark.parametrize("seen, whole", [((512, 448), False), ((512, 512), True), ((512, 513), True)])
def test_a_profiler_that_loses_kernels_of_a_graph(monkeypatch, seen, whole):
    counts = iter(seen)
    monkeypatch.setattr(preflight, "kernels_seen", lambda *_: next(counts))
    monkeypatch.setattr(preflight.devices, "capture_graph", lambda work: work)
    check = preflight.graphs(CPU)
    assert check.ok == whole and check.found == f"torch.profiler sees {seen[1]} of 512 kernels of a replayed graph"
    assert whole or "7.2.2" in check.mend


# A machine with ROCm: what a check asks, the answer that is wrong, and the line that is printed then.
ROCM = {
    "GPU formats": (
        (torch.cuda, "is_bf16_supported", False),
        "no bf16; then --use-amp needs --amp-dtype float16; to mend it: choose another GPU",
    ),
    "attention": (
        (torch, "_fused_sdp_choice", 0),
        "PyTorch takes MATH; then Version 2's attention writes its S x S scores as Version 1 does; to mend it: on RDNA set "
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
    ),
    "products": (
        (preflight.subprocess, "run", subprocess.CompletedProcess([], 0, "612.4 NN\n", "")),
        "bf16 takes at most 612 ms (1024 x 1024, layout NN); then --use-amp may take minutes for a step; to mend it: set "
        "TORCH_BLAS_PREFER_HIPBLASLT=0 (see MACHINES.md)",
    ),
    "graphs": (
        (preflight, "kernels_seen", 448),
        "torch.profiler sees 448 of 512 kernels of a replayed graph; then profiles of captured steps are short; to mend it: "
        "profile with --no-capture-step, or take a PyTorch whose own libraries are of ROCm 7.2.2 or newer",
    ),
}


@pytest.mark.parametrize("name", ["", *ROCM])
def test_a_flight_on_rocm_names_each_fault_in_one_line(machine, monkeypatch, capsys, name):
    """PyTorch's CPU stands in for the GPU, and only the named check gets a wrong answer."""
    right = {
        (torch.version, "hip"): "7.2", (preflight.devices, "is_gpu"): True, (preflight.devices, "select"): CPU,
        (preflight.devices, "describe"): {"name": "AMD Instinct MI300X", "memory_mib": 192 << 10},
        (preflight.devices, "free_memory"): (180 << 30, 192 << 30), (preflight.devices, "synchronize"): None,
        (preflight.devices, "capture_graph"): None, (torch.cuda, "is_bf16_supported"): True, (torch, "_fused_sdp_choice"): 1,
        (preflight, "kernels_seen"): 512, (preflight.subprocess, "run"): subprocess.CompletedProcess([], 0, "0.031 TN\n", ""),
    }  # fmt: skip
    for (owner, attribute), answer in right.items():
        monkeypatch.setattr(owner, attribute, answer if attribute == "hip" else lambda *_, answer=answer, **__: answer)
    if name:
        owner, attribute, answer = ROCM[name][0]
        answers = iter([512, 512, answer])  # of the profiler's check, and of the eager and the replayed step
        wrong = (lambda *_: next(answers)) if attribute == "kernels_seen" else lambda *_, **__: answer
        monkeypatch.setattr(owner, attribute, wrong)
    monkeypatch.setattr(preflight, "wrapped", lambda text, indent: text)
    assert flight(monkeypatch) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  missing")]
    found = {check: line for check in ROCM for line in printed if line.startswith(f"  missing  {check} ")}
    assert found == ({name: f"  missing  {name:<16} {ROCM[name][1]}"} if name else {})


@pytest.mark.gpu
def test_a_real_gpu_is_described_and_its_kernels_are_seen():
    device = torch.device("cuda")
    for check in (preflight.attention(device), preflight.products(), preflight.graphs(device), preflight.formats()):
        assert check.ok, check
    assert preflight.gpu(device).ok and "GiB free" in preflight.gpu_memory(device).found
    assert preflight.profiler(device).found == "torch.profiler sees kernels"


# ------------------------------------------------------------------------------------------------- tools and permissions


def test_tools_that_are_there_and_tools_that_are_not(machine):
    machine.command("nsys", "true")
    machine.command("nvidia-smi", "/bin/echo 0, 87, 412.31, 20480, 1980, 2619")
    assert preflight.tool("nvidia", "nsys") == Check("nsys", str(machine.bin / "nsys"))
    assert preflight.tool("nvidia", "nvidia-smi").found.endswith("reports 1 GPU")
    missing = preflight.tool("amd", "rocprofv3")
    assert not missing.ok and "rocprofiler-sdk" in missing.mend
    machine.command("nvidia-smi", "false")
    assert preflight.tool("nvidia", "nvidia-smi").found.endswith("reports no GPU")


def test_the_tools_of_the_vendor_are_asked_for(machine):
    preflight.KFD.touch()
    amd = {check.name for check in preflight.checks(CPU)}
    preflight.KFD.unlink()
    preflight.NVIDIA_PARAMETERS.touch()
    nvidia = {check.name for check in preflight.checks(CPU)}
    assert amd - nvidia == {*preflight.TOOLS["amd"], "permissions"}
    assert nvidia - amd == {*preflight.TOOLS["nvidia"], "counters"}


def test_device_files_of_an_amd_gpu(machine, monkeypatch):
    assert "there is no " in preflight.permissions(CPU).found
    preflight.KFD.touch()
    preflight.RENDER_NODES.mkdir()
    node = preflight.RENDER_NODES / "renderD128"
    node.touch()
    assert preflight.permissions(CPU).ok

    monkeypatch.setattr(os, "access", lambda path, mode: path != node or mode == os.R_OK)  # it is not writable
    closed = preflight.permissions(CPU)
    assert closed.found.startswith(f"{node} is closed") and f"--group-add {node.stat().st_gid}" in closed.mend
    monkeypatch.setattr(preflight.devices, "is_gpu", lambda _: True)  # WSL has no /dev/kfd
    assert preflight.permissions(CPU).ok


@pytest.mark.parametrize(
    "restricted, capabilities, allowed", [(1, 0, False), (1, 0x200000, True), (1, 0xA80425FB, False), (0, 0, True)]
)
def test_who_may_read_counters(machine, restricted, capabilities, allowed):
    """root in a container has the third set of capabilities, which lacks CAP_SYS_ADMIN."""
    preflight.NVIDIA_PARAMETERS.write_text(f"ResmanDebugLevel: 1\nRmProfilingAdminOnly: {restricted}\n")
    preflight.STATUS.write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n")
    check = preflight.counters()
    assert check.ok == allowed and (allowed or "ERR_NVGPUCTRPERM" in check.without)


# --------------------------------------------------------------------------------------------------- the machine itself


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))  # now no other process gets this port, and it is free until somebody listens
        number = taken.getsockname()[1]
        assert preflight.port(number, "tensorboard", "--port").ok
        taken.listen()
        check = preflight.port(number, "tensorboard", "--port")
    assert not check.ok and check.name == f"port {number}" and "--port" in check.mend


@pytest.mark.parametrize("wanted, ok", [(1.9, True), (2.1, False)])
def test_other_work_on_the_machine(monkeypatch, wanted, ok):
    monkeypatch.setattr(preflight.devices, "load", lambda: (wanted, 2))
    check = preflight.load()
    assert check.ok == ok and check.found == f"{wanted} processes on 2 cores in the last minute"
    assert ok or "OMP_NUM_THREADS=1" in check.mend


def test_a_check_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    check = Check("permissions", "/dev/kfd is closed to this user (groups 1000)", "ROCm sees no GPU", "do this " * 20)
    first, *others = check.line().splitlines()
    assert others and all(line.startswith(" " * 28) for line in others) and len(max((first, *others), key=len)) <= 100


def test_room_on_disk_and_in_memory(monkeypatch):
    usage = namedtuple("usage", "total used free")
    for gib, enough in ((1.5, False), (50, True)):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, gib=gib: usage(0, 0, gib * 2**30))
        monkeypatch.setattr(preflight.devices, "describe", lambda _, gib=gib: {"memory_mib": gib * 1024})
        assert (preflight.disk().ok, preflight.memory().ok) == (enough, enough)


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING"])
def test_a_variable_that_slows_a_run(machine, monkeypatch, name):
    assert preflight.variables().ok
    monkeypatch.setenv(name, "1")
    assert preflight.variables().found == f"{name}=1"
    monkeypatch.setenv(name, "0")
    assert preflight.variables().ok


def test_gloo_works_or_its_error_is_shown(monkeypatch):
    assert preflight.processes().ok and not torch.distributed.is_initialized()

    def fails(*_, **__):
        raise RuntimeError("Unable to find address for: lo\nmore")

    monkeypatch.setattr(torch.distributed, "init_process_group", fails)
    check = preflight.processes()
    assert check.found == "Unable to find address for: lo" and "GLOO_SOCKET_IFNAME" in check.mend


def test_the_text_is_prepared_or_the_cache_is_named(monkeypatch, tmp_path):
    prepared = data.Dataset("stdlib", numpy.zeros(1000, numpy.uint32), "0" * 64, tokenizer=tmp_path / "tokenizer.json")
    monkeypatch.setattr(data, "load", lambda *_, **__: prepared)
    assert preflight.text().found == f"1,000 tokens in {tmp_path}"

    def refuses(*_, **__):
        raise UsageError("neither a nor b can be written to")

    monkeypatch.setattr(data, "load", refuses)
    assert "--data synthetic" in preflight.text().without


@needs_interpreter
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_triton_interprets_a_kernel_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = preflight.triton(CPU)
    assert check.ok and "interprets" in check.found, check


def test_triton_that_fails_or_is_not_there(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    assert not preflight.triton(CPU).ok
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert preflight.triton(CPU).found == "not installed" and "WSL" in preflight.triton(CPU).mend
