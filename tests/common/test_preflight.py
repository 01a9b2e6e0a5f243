"""Preflight: its lines and the exit code."""

import sys

from common import cli, preflight
from common.preflight import Check
from tracepage.files import read_json

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch) -> None:
    """A CPU without compilers that take seconds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        preflight.devices, "compile_problem", lambda _: "torch.compile does not work here: no g++"
    )
    monkeypatch.setattr(preflight, "text", lambda: Check("text", True, "1,000 tokens"))


def flight(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["preflight", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.command(preflight.main)
    return ended.value.code


def test_a_laptop_is_ready_for_version_1(quick, monkeypatch, capsys, tmp_path):
    assert flight(monkeypatch, "--json", tmp_path / "preflight.json") == 0
    printed = capsys.readouterr().out
    assert "missing  torch.compile" in printed and printed.endswith("\nVersion 1 can be run\n")
    found = read_json(tmp_path / "preflight.json", preflight.SCHEMA)
    assert all(check["name"] in printed for check in found["checks"])
    assert {*preflight.NEEDED} <= {check["name"] for check in found["checks"] if check["ok"]}


def test_without_a_text_version_1_is_not_ready(quick, monkeypatch, capsys, tmp_path):
    assert flight(monkeypatch, "--json", tmp_path) == 2
    assert capsys.readouterr().out == "", (
        "a result that cannot be written is refused before any check"
    )
    monkeypatch.setattr(preflight, "text", lambda: Check("text", False, "no folder"))
    assert flight(monkeypatch) == 1
    assert capsys.readouterr().out.endswith(
        "Version 1 can't be run: mend what is missing for it first\n"
    )


def test_other_programs_are_told_and_are_no_obstacle(quick, monkeypatch, capsys):
    monkeypatch.setattr(preflight.OtherPrograms, "note", lambda _: "put OMP_NUM_THREADS=1 in front")
    assert flight(monkeypatch) == 0
    assert "missing  idle device    put OMP_NUM_THREADS=1" in capsys.readouterr().out


def test_a_device_that_computes_nothing():
    assert preflight.training(CPU).ok and not preflight.training(torch.device("meta")).ok


@pytest.mark.gpu
def test_a_real_gpu_is_described_and_its_kernels_are_seen():
    device = torch.device("cuda")
    assert "GiB free" in preflight.gpu(device).found and preflight.training(device).ok
    assert preflight.profiler(device).found == "torch.profiler sees kernels"
