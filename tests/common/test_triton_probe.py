"""The kernel that preflight runs: interpreted, and what is said of a wrong result."""

import importlib.util
import sys

from tests.conftest import runs_kernels

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")


@runs_kernels
def test_a_wrong_result_is_exit_code_1(monkeypatch, capsys):
    from common import triton_probe

    import torch

    monkeypatch.setattr(sys, "argv", ["triton_probe", "cuda" if torch.cuda.is_available() else "cpu"])
    triton_probe.main()
    assert capsys.readouterr().out.count(".") >= 2  # triton's version

    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="computed a wrong result"):
        triton_probe.main()
