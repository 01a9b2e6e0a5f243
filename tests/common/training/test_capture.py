"""A captured step: the losses and gradients of the eager step, and one line where a step cannot be
captured.
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from common import data, ranks
from common import device as devices
from common.config import ModelConfig
from common.precision import Precision
from common.training import capture, preparation
from common.training.run import resolve_for_device
from common.training.study_step import prepare_for_study
from studies import version_files
from tests.conftest import PATHS, ROOT, run_options
from tracepage.errors import UsageError
from tracepage.records import step_profile
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

VERSIONS = {
    "v1": ("version1_pytorch_baseline/tiny_llama_v1.py", ()),
    "v2": ("version2_pytorch_fused/tiny_llama_v2.py", ()),
    "v2-compile": ("version2_pytorch_fused/tiny_llama_v2.py", ("--enable-torch-compile",)),
    "v3": ("version3_triton/tiny_llama_v3.py", ()),
    "v4": ("version4_ultra_fused/tiny_llama_v4.py", ()),
    "v4-bf16-moments": ("version4_ultra_fused/tiny_llama_v4.py", ("--enable-bf16-moments",)),
}
STEPS = 50
CUDA = torch.device("cuda")


def options(name: str, *flags: str, **changes) -> tuple:
    """A version, and its resolved options at a small size."""
    path, own = VERSIONS[name]
    version = version_files.load(ROOT / path)
    parsed = version_files.resolve(
        version_files.parser(None).parse_args([*flags, "--batch-size", "4", "--seq-len", "64"])
    )
    model = ModelConfig(
        hidden_size=128,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
    )
    return version, replace(version_files.switched(version, parsed, *own), model=model, **changes)


def train(
    name: str, captured: bool, *flags: str, amp: torch.dtype | None = None
) -> tuple[list[float], dict]:
    """Losses of STEPS steps, and the gradients of one more at their end; eager with AdamW in its
    capturable form.
    """
    version, chosen = options(name, *flags, capture_step=captured)
    devices.configure(CUDA, chosen.seed, deterministic=True)
    precision = Precision(CUDA, amp)
    source = data.markov(chosen.model.vocab_size, chosen.seed)
    batches = data.Batches(
        source, (chosen.batch_size, chosen.seq_len, STEPS + 1), chosen.seed, CUDA
    )
    if captured:
        model, optimizer, take, _ = prepare_for_study(version, chosen, precision, batches[0])
    else:
        model = version.make_model(chosen).to(CUDA)
        optimizer = preparation.capturable(version.make_optimizer(model, chosen), precision)
        take = version.make_step(model, optimizer, precision)
        preparation.warm_up(preparation.Prepared(model, optimizer, take), precision, batches[0])
    losses = [take(batches[i]).item() for i in range(STEPS)]
    preparation.forget(optimizer, precision, precision.scaler.state_dict())
    take(batches[STEPS])
    return losses, preparation.gradients(model, optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", VERSIONS)
def test_a_captured_step_trains_as_the_eager_one(name, amp):
    if name.startswith("v4") and amp == torch.float16:
        pytest.skip("needs a version that scales its loss")
    eager, gradients = train(name, False, amp=amp)
    captured, same = train(name, True, amp=amp)
    assert captured == eager and eager[-1] < eager[0]
    assert all(torch.equal(gradients[parameter], same[parameter]) for parameter in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VERSIONS)
def test_the_capturable_optimizer_rounds_no_more_than_fp32_does(name):
    """AdamW as `make_optimizer` makes it counts its steps on the host, in double precision."""
    version, chosen = options(name)
    devices.configure(CUDA, chosen.seed)
    precision, batch = Precision(CUDA, None), version_files.random_batch(chosen, CUDA)
    take = prepare_for_study(version, chosen, precision, batch).step
    plain = [take(batch).item() for _ in range(STEPS)]
    chosen = replace(chosen, capture_step=True)
    take = prepare_for_study(version, chosen, precision, batch).step
    assert [take(batch).item() for _ in range(STEPS)] == pytest.approx(plain, abs=2e-3)


@pytest.mark.gpu
def test_memory_of_a_captured_step_counts_the_pool_of_its_graph():
    version, chosen = options("v1", capture_step=True)
    devices.configure(CUDA, chosen.seed)
    precision, batch = Precision(CUDA, None), version_files.random_batch(chosen, CUDA)
    captured = prepare_for_study(version, chosen, precision, batch)
    devices.reset_peak_memory(CUDA)
    captured.step(batch)
    uncounted, counted = (
        devices.peak_memory(CUDA),
        devices.peak_memory(CUDA, captured.graph_peak_bytes),
    )
    assert uncounted["peak_mib"] < counted["peak_mib"] <= counted["reserved_mib"]


WAITING = """
import torch
from tracepage.errors import RunError
from common.training import capture

batch = (torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))
try:
    capture.CapturedStep(lambda batch: batch[0] * batch[0].sum().item(), batch)
except RunError as error:
    print(error)
"""


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_is_refused_in_one_line():
    """In a process of its own: a capture that failed leaves PyTorch without random numbers on the
    GPU.
    """
    done = subprocess.run(
        [sys.executable, "-c", WAITING],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": PATHS},
    )
    assert (
        done.stdout.count("\n") == 1
        and "cannot be captured" in done.stdout
        and "previous error" not in done.stdout
    )


def calls_by_span(name: str, captured: bool, folder: Path) -> dict:
    """Launches a step by span and phase, from a profile of a run; without the optimizer's, which
    has another form in a graph.
    """
    path, own = VERSIONS[name]
    version = version_files.load(ROOT / path)
    flags = (
        "--num-steps",
        6,
        "--profile-dir",
        folder,
        "--metrics-out",
        folder / "metrics.json",
        "--data",
        "synthetic",
    )
    options = replace(run_options(version, *flags, *own), capture_step=captured)
    profile = step_profile.read(version.train(options).profiles[0])
    counted = Counter()
    for kernel in profile["kernels"]:
        if kernel["name"].startswith("Mem"):
            continue  # a graph's fills are not in a trace
        counted[kernel["span"], kernel["phase"]] += kernel["calls"] / profile["profiled_steps"]
    return {key: calls for key, calls in counted.items() if key[0] not in ("optimizer", "other")}


@pytest.mark.gpu
# a compiled model has no spans inside
@pytest.mark.parametrize("name", [name for name in VERSIONS if name != "v2-compile"])
def test_a_profile_of_a_captured_step_shows_the_spans_of_the_eager_one(name, tmp_path):
    eager, captured = (calls_by_span(name, on, tmp_path / str(on)) for on in (False, True))
    assert captured == eager and len(eager) >= 2


@pytest.mark.parametrize(
    "flags, captured", [((), True), (("--time-phases",), False), (("--no-capture-step",), False)]
)
def test_a_version_that_captures_does_so_unless_phases_are_timed(monkeypatch, flags, captured):
    monkeypatch.setattr(devices, "is_gpu", lambda device: True)
    options = run_options(tiny_llama_v1, *flags)
    resolved = resolve_for_device(options, "v1", True, ranks.FORMS, CUDA)
    assert resolved.capture_step is captured


def test_batches_of_another_shape_and_graphs_of_compile_are_refused(monkeypatch):
    captured = capture.CapturedStep.__new__(capture.CapturedStep)  # to capture one needs a GPU
    captured.batch = (torch.zeros(4, 8), torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"captured for batches of \[4, 8\], not \[1, 8\]"):
        captured((torch.ones(1, 8), torch.ones(1, 8)))
    assert not captured.batch[0].any()

    monkeypatch.setattr(devices, "is_gpu", lambda device: True)
    with pytest.raises(UsageError, match="max-autotune captures graphs of its own"):
        capture.check_supported(CUDA, "max-autotune")


def test_the_capturable_optimizer_keeps_its_settings():
    weight = torch.nn.Parameter(torch.ones(2))
    made = preparation.capturable(
        torch.optim.AdamW([weight], lr=0.25, betas=(0.5, 0.75), weight_decay=0.125),
        Precision(torch.device("cpu"), None),
    )
    group = made.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["capturable"]) == (
        0.25,
        (0.5, 0.75),
        0.125,
        True,
    )
    assert group["params"] == [weight] and not group["fused"]
    half = Precision(torch.device("cpu"), torch.float16)
    assert preparation.capturable(torch.optim.AdamW([weight]), half).defaults["fused"], (
        "which leaves out a step that has overflowed"
    )


@pytest.mark.parametrize(
    "theirs, error", [([3.0, -4.0], 0.0), ([3.0, -3.0], 0.2), ([3.0, float("nan")], float("inf"))]
)
def test_the_difference_is_relative_to_the_norm(theirs, error):
    """The tensor that differs most counts; NaN counts as infinite."""
    first, same = torch.tensor([3.0, -4.0]), torch.tensor([8.0])
    assert capture.difference([first, same], [torch.tensor(theirs), same]) == pytest.approx(error)
