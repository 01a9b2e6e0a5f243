"""External baselines: they compute and learn what Version 1 does, without extra work."""

from argparse import Namespace

from common import device as devices
from common.precision import Precision
from common.training import capture, study_step
from studies import accuracy, version_files
from studies.peers import external_baselines
from tests import models, study_options
from tracepage.errors import UsageError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
import torch.nn.functional as F

CPU = torch.device("cpu")
CONFIG = study_options.PEER
OPTIONS = Namespace(model=CONFIG, batch_size=2, seq_len=9, seed=0, learning_rate=1e-3)


def pair(peer: str, working: torch.dtype | None = None):
    """A peer without torch.compile and capture, maybe with other working copies, Version 1, both
    with a model; and a batch.
    """
    if peer == "hf":
        pytest.importorskip("transformers", reason="needs transformers")
    version = external_baselines.PEERS[peer]._replace(compiled=False)
    version = version._replace(working=working) if working else version
    torch.manual_seed(3)
    return (
        version,
        tiny_llama_v1.TinyLlama(CONFIG),
        version.make_model(OPTIONS),
        version_files.random_batch(OPTIONS, CPU),
    )


@pytest.mark.parametrize(
    "name, working, fused_loss",
    [
        ("hf", None, True),
        ("captured", None, True),
        ("captured", None, False),
        ("captured-bf16", torch.float32, True),
    ],
)
def test_a_peer_has_the_weights_logits_loss_and_gradients_of_version_1(
    name, working, fused_loss, monkeypatch
):
    if not fused_loss:
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)  # which not every PyTorch has
    peer, ours, theirs, batch = pair(name, working)
    state, their_state = ours.baseline_state_dict(), theirs.baseline_state_dict()
    assert state.keys() == their_state.keys() and all(
        torch.equal(state[name], their_state[name]) for name in state
    )
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    state = accuracy.draw_weights(ours)  # with norms that are not 1
    for model in (ours, theirs):
        accuracy.exchange(model, state)  # also checks that they come back from baseline_state_dict
    expected = accuracy.outputs(tiny_llama_v1, ours, OPTIONS, batch, Precision(CPU, None))
    got = accuracy.outputs(peer, theirs, OPTIONS, batch, Precision(CPU, None))
    assert expected.keys() == got.keys()
    assert {
        name: e for name in expected if not (e := accuracy.error(expected[name], got[name])) < 1e-5
    } == {}


@pytest.mark.parametrize(
    "name, dtype, rate, tolerance",
    [
        ("hf", None, 1e-2, 3e-6),
        ("captured", torch.bfloat16, 3e-3, 5e-3),
        ("captured-bf16", torch.bfloat16, 3e-3, 5e-3),
    ],
)
def test_a_peer_learns_as_version_1_does(name, dtype, rate, tolerance):
    peer, ours, theirs, batch = pair(name)
    runs = ((tiny_llama_v1, ours), (peer, theirs))
    expected, losses = (
        models.losses(*own, [batch] * 6, Precision(CPU, dtype), rate=rate) for own in runs
    )
    assert losses == pytest.approx(expected, rel=tolerance) and expected[-1] < 0.8 * expected[0]
    assert all(parameter.dtype == torch.float32 for parameter in theirs.parameters())
    if name != "hf":
        copy = theirs.lm_head.working
        assert (
            (copy is None)
            if name == "captured"
            else (copy.dtype == torch.bfloat16 and copy.grad is None)
        )
        assert all(parameter.grad is None for parameter in theirs.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_hf_builds_no_attention_mask(compiled, monkeypatch):
    _, _, theirs, batch = pair("hf")
    calls = []
    if compiled:

        def backend(graph, inputs):
            calls.extend(
                node.kwargs
                for node in graph.graph.nodes
                if "scaled_dot_product_attention" in str(node.target)
            )
            return graph

        torch.compile(theirs.loss, backend=backend)(*batch)
    else:
        real = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            lambda *a, **k: calls.append(k) or real(*a, **k),
        )
        theirs.loss(*batch)
    assert len(calls) == CONFIG.num_layers
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)


@pytest.mark.parametrize(
    "name, absent, device, amp_dtype, message",
    [
        (
            "hf",
            "transformers",
            "cpu",
            None,
            "hf needs what is not installed here: pip install 'transformers>=4.53'",
        ),
        ("liger", None, "cpu", None, "liger needs an NVIDIA or AMD GPU"),
        (
            "captured-bf16",
            None,
            "cuda",
            torch.float16,
            "captured-bf16 needs --use-amp with bfloat16",
        ),
    ],
)
def test_a_peer_that_cannot_run_says_what_is_missing(
    name, absent, device, amp_dtype, message, monkeypatch
):
    monkeypatch.setattr(
        external_baselines.importlib.util,
        "find_spec",
        lambda module: None if module == absent else object(),
    )
    with pytest.raises(UsageError) as raised:
        external_baselines.PEERS[name].check(torch.device(device), amp_dtype)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, flags",
    [
        ("captured", []),
        ("captured", ["--use-amp"]),
        ("captured-bf16", ["--use-amp"]),
    ],
    ids=["captured-fp32", "captured-amp", "captured-bf16"],
)
def test_the_step_of_a_captured_peer_is_captured_and_learns(name, flags):
    for package in external_baselines.PEERS[name].packages:
        pytest.importorskip(package, reason=f"needs {package}")
    options = study_options.resolved(
        None, *flags, "--batch-size", "4", "--seq-len", "64", "--device", "cuda"
    )
    cuda, peer = torch.device("cuda"), external_baselines.PEERS[name]
    devices.configure(cuda, options.seed)
    precision, batch = (
        Precision(cuda, torch.bfloat16 if flags else None),
        version_files.random_batch(options, cuda),
    )
    prepared = study_step.prepare_for_study(peer, options, precision, batch)
    losses = [prepared.step(batch).item() for _ in range(10)]
    assert isinstance(prepared.step, capture.CapturedStep)
    # the logarithm of 1000 tokens at first
    assert losses[-1] < 0.9 * losses[0] and losses[0] == pytest.approx(6.9, abs=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, flags",
    [
        ("captured", ["--use-amp"]),
        ("captured-bf16", ["--use-amp"]),
        ("liger", []),
        ("liger-compile", []),
    ],
)
def test_the_gradients_of_a_peer_on_a_gpu_are_those_of_version_1(name, flags):
    if "liger" in name:
        pytest.importorskip("liger_kernel", reason="needs Liger")
    options = study_options.resolved(None, *flags, "--seq-len", "33", "--device", "cuda")
    ours, theirs = (
        accuracy.errors_against_float64(tiny_llama_v1, version, options, [])
        for version in (tiny_llama_v1, external_baselines.PEERS[name])
    )
    assert max(theirs.values()) < (2 * max(ours.values()) if flags else 1e-4)
