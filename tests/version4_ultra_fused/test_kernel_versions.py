"""Versions 3 and 4 as versions: the losses and gradients of Version 1, what they say without a GPU,
and their other scripts.

Without a GPU the kernels run in Triton's interpreter where a test asks for them, and PyTorch's
operations elsewhere.
"""

from types import ModuleType

from common import device as devices
from common.precision import Precision
from tests import models
from tests.conftest import ROOT, TINY, runs_kernels
from tests.oracle import DEVICE, interpreted
from tracepage.files import read_json
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import tiny_llama_v3
from version3_triton.kernels import dependent_launch
from version4_ultra_fused import tiny_llama_v4

QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")
VERSIONS = {3: tiny_llama_v3, 4: tiny_llama_v4}
PROFILING = {
    3: ROOT / "version3_triton/run_triton_profiling.py",
    4: ROOT / "version4_ultra_fused/run_ultra_profiling.py",
}
NO_PLAN = {"memory-plan": False, "side-stream": False, "early-update": False}
FP32_GRADIENT = {"fp32-residual-gradient": True}
FP32 = Precision(DEVICE, None)
CEILINGS = {
    "bytes_per_second": 1e12,
    "flops_per_second": 1e14,
    "operation_seconds": 1e-6,
    "precision": "bf16",
}
each_version = pytest.mark.parametrize("number", VERSIONS, ids="v{}".format)
plain_and_triton = pytest.mark.parametrize(
    "triton", [False, pytest.param(True, marks=runs_kernels)], ids=["plain", "triton"]
)


def built(
    version: ModuleType, switches: dict[str, bool], triton: bool, kv_heads: int = 2
) -> torch.nn.Module:
    """A version's model; Version 3 without kernels has all its switches off."""
    off = dict.fromkeys(version.SWITCHES, False) if version is tiny_llama_v3 and not triton else {}
    return models.build(
        version, version.SWITCHES | off | switches, kv_heads=kv_heads, device=DEVICE
    )


# ------------------------------------------------------------------------------------------------------- the same model


@plain_and_triton
@pytest.mark.parametrize(
    "number, kv_heads, switches",
    [(3, 2, {}), (4, 2, {}), (4, 1, {}), (4, 2, NO_PLAN), (4, 2, FP32_GRADIENT)],
    ids=str,
)
def test_losses_of_version_1(request, triton, number, kv_heads, switches):
    if not triton:
        request.getfixturevalue("no_kernels")
    version = VERSIONS[number]
    first, other = (
        models.build(tiny_llama_v1, kv_heads=kv_heads, device=DEVICE),
        built(version, switches, triton, kv_heads),
    )
    batches = [models.batch(DEVICE)] * (2 if triton or DEVICE.type == "cuda" else 5)
    expected = models.losses(tiny_llama_v1, first, batches, FP32)
    assert models.losses(version, other, batches, FP32) == pytest.approx(expected, abs=1e-5)
    # a step leaves none behind
    assert all(parameter.grad is None for parameter in other.parameters())
    assert expected[-1] < expected[0]


@plain_and_triton
@pytest.mark.parametrize("ignored", [0, 5])
@each_version
def test_every_parameter_gets_the_gradient_of_version_1(request, triton, number, ignored):
    """Without Version 4's optimizer gradients stand in `.grad`. Targets of -100 do not count in any
    version.
    """
    if not triton:
        request.getfixturevalue("no_kernels")
    batch = models.batch(DEVICE)
    batch[1][:, :ignored] = -100
    expected = models.gradients(models.build(tiny_llama_v1, device=DEVICE), batch)
    found = models.gradients(built(VERSIONS[number], {}, triton), batch)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


# ------------------------------------------------------------------------------------------------------ on the command line


@each_version
def test_without_a_gpu_a_line_says_so_and_the_record_says_why(
    execute, no_kernels, known_ceilings, tmp_path, number
):
    flags = ("--device", "cpu", "--metrics-out", "run.json")
    said = execute(VERSIONS[number].__file__, *QUICK, *flags).err
    [line] = [line for line in said.splitlines() if "Triton" in line]
    assert line.startswith("no Triton kernels: they need a GPU")
    settings = read_json(tmp_path / "run.json")["settings"]
    assert "need a GPU" in settings.pop("no_kernels") and "capture_step" not in settings
    assert number == 4 or settings == {
        name.replace("-", "_"): name == "fused-adamw" for name in tiny_llama_v3.SWITCHES
    }


@interpreted
@each_version
def test_it_runs_the_kernels_in_the_interpreter(execute, known_ceilings, tmp_path, number):
    small = (
        "--num-layers",
        "1",
        "--num-steps",
        "1",
        "--vocab-size",
        "16",
        "--seq-len",
        "4",
        "--batch-size",
        "1",
    )
    off = ["--disable-triton-loss"] if number == 3 else []
    said = execute(VERSIONS[number].__file__, *QUICK, *small, *off, "--metrics-out", "run.json").err
    settings = read_json(tmp_path / "run.json")["settings"]
    assert "no Triton kernels" not in said and "no_kernels" not in settings
    if number == 3:
        assert settings == {
            name.replace("-", "_"): name != "triton-loss" for name in tiny_llama_v3.SWITCHES
        }
    else:
        assert settings["side_stream"] is True


# ------------------------------------------------------------------------------------------------------- other scripts


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "number, switches, dtype",
    [(3, {}, dtype) for dtype in (None, torch.bfloat16, torch.float16)]
    + [
        (4, switches, dtype)
        for switches in (
            {},
            {"side-stream": False},
            NO_PLAN,
            {"early-update": False},
            FP32_GRADIENT,
        )
        for dtype in (None, torch.bfloat16)
    ]
    + [(4, {"bf16-moments": True}, torch.bfloat16)],
    ids=str,
)
def test_it_trains_as_version_1_on_the_gpu(number, switches, dtype):
    devices.configure(DEVICE, 0)
    batches, precision, version = (
        [models.batch(DEVICE)] * 10,
        Precision(DEVICE, dtype),
        VERSIONS[number],
    )
    first = models.losses(
        tiny_llama_v1, models.build(tiny_llama_v1, device=DEVICE), batches, precision
    )
    found = models.losses(version, built(version, switches, triton=True), batches, precision)
    assert found == pytest.approx(first, abs=1e-4 if dtype is None else 3e-2)


@pytest.mark.gpu
@each_version
def test_the_same_seed_gives_the_same_bits(number):
    devices.configure(DEVICE, 0, deterministic=True)
    version, precision = VERSIONS[number], Precision(DEVICE, torch.bfloat16)
    first, second = (
        models.losses(
            version, models.build(version, device=DEVICE), [models.batch(DEVICE)] * 5, precision
        )
        for _ in range(2)
    )
    assert first == second


@pytest.mark.gpu
def test_launches_that_overlap_change_no_bit(monkeypatch):
    def losses() -> list[float]:
        devices.configure(DEVICE, 0, deterministic=True)
        batches, precision = [models.batch(DEVICE)] * 10, Precision(DEVICE, torch.bfloat16)
        return models.losses(
            tiny_llama_v4, models.build(tiny_llama_v4, device=DEVICE), batches, precision
        )

    early = losses()
    monkeypatch.setattr(dependent_launch, "ARGUMENTS", {})
    assert losses() == early
