"""External baselines: they compute and learn what Version 1 does, without extra work."""

from argparse import Namespace
from dataclasses import replace

from common import device as devices
from common.config import ModelConfig
from common.errors import UsageError
from common.precision import Precision
from common.studies import accuracy, external_baselines
from common.training import capture, version_files
from common.training import step as steps
from tests import models
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

HF = external_baselines.PEERS["hf"]
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_sequence_length=16, rope_theta=500.0, rms_norm_eps=1e-3,
)  # fmt: skip
OPTIONS = Namespace(model=CONFIG, batch_size=2, seq_len=9, seed=0, learning_rate=1e-3)


def pair(dtype: torch.dtype | None = None):
    """Version 1 and hf with the same initial weights, a batch of each and a precision."""
    pytest.importorskip("transformers")
    torch.manual_seed(3)
    ours, theirs = tiny_llama_v1.TinyLlama(CONFIG), HF.make_model(OPTIONS)
    return ours, theirs, version_files.random_batch(OPTIONS, torch.device("cpu")), Precision(torch.device("cpu"), dtype)


@pytest.mark.parametrize("name", ["hf", "captured"])
def test_a_peer_starts_from_the_weights_of_version_1(name):
    if name == "hf":
        pytest.importorskip("transformers")
    torch.manual_seed(3)
    ours, theirs = tiny_llama_v1.TinyLlama(CONFIG), external_baselines.PEERS[name].make_model(OPTIONS)
    state, their_state = ours.baseline_state_dict(), theirs.baseline_state_dict()
    assert state.keys() == their_state.keys() and all(torch.equal(state[name], their_state[name]) for name in state)
    assert name == "captured" or theirs.llama.lm_head.weight is theirs.llama.model.embed_tokens.weight
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


def test_hf_has_the_logits_loss_and_gradients_of_version_1():
    ours, theirs, batch, precision = pair()
    state = accuracy.weights(ours)  # with norms that are not 1
    for model in (ours, theirs):
        accuracy.exchange(model, state)
    expected = accuracy.outputs(tiny_llama_v1, ours, OPTIONS, batch, precision)
    got = accuracy.outputs(HF, theirs, OPTIONS, batch, precision)
    assert expected.keys() == got.keys()
    for name in expected:
        assert accuracy.error(expected[name], got[name]) < 1e-5, name


@pytest.mark.parametrize("dtype, tolerance", [(None, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_hf_learns_as_version_1_does(dtype, tolerance):
    ours, theirs, batch, precision = pair(dtype)
    losses = [models.losses(*own, [batch] * 6, precision) for own in ((tiny_llama_v1, ours), (HF, theirs))]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance) and losses[0][-1] < 0.8 * losses[0][0]
    assert all(parameter.dtype == torch.float32 for parameter in theirs.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_hf_builds_no_attention_mask(compiled, monkeypatch):
    _, theirs, batch, _ = pair()
    calls = []
    if compiled:

        def backend(graph, inputs):
            calls.extend(node.kwargs for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
            return graph

        torch.compile(theirs.loss, backend=backend)(*batch)
    else:
        real = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or real(*a, **k))
        theirs.loss(*batch)
    assert len(calls) == CONFIG.num_layers
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)


@pytest.mark.parametrize("name", ["captured", "captured-bf16"])
def test_a_captured_peer_learns_as_version_1_does(name):
    """Without torch.compile and without capture."""
    peer, precision = replace(external_baselines.PEERS[name], compiled=False), Precision(torch.device("cpu"), torch.bfloat16)
    torch.manual_seed(3)
    ours, theirs = tiny_llama_v1.TinyLlama(CONFIG), peer.make_model(OPTIONS)
    batch = version_files.random_batch(OPTIONS, precision.device)
    losses = [models.losses(*own, [batch] * 6, precision, rate=3e-3) for own in ((tiny_llama_v1, ours), (peer, theirs))]
    assert losses[1] == pytest.approx(losses[0], rel=3e-3) and losses[0][-1] < 0.8 * losses[0][0]
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in theirs.parameters())
    copy = theirs.lm_head.working
    assert (copy is None) if name == "captured" else (copy.dtype == torch.bfloat16 and copy.grad is None)


@pytest.mark.parametrize(
    "name, absent, message",
    [
        ("hf", "transformers", "hf needs what is not installed here: pip install 'transformers>=4.51'"),
        ("liger", "liger_kernel", "pip install --no-deps liger-kernel"),
        ("liger", None, "liger needs an NVIDIA or AMD GPU"),
    ],
)
def test_a_peer_that_cannot_run_says_what_is_missing(name, absent, message, monkeypatch):
    monkeypatch.setattr(external_baselines.importlib.util, "find_spec", lambda module: None if module == absent else object())
    with pytest.raises(UsageError) as raised:
        external_baselines.PEERS[name].check(torch.device("cpu"), None)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, device, amp_dtype, message",
    [
        ("captured", "cpu", None, "captured needs an NVIDIA or AMD GPU"),
        ("captured-bf16", "cpu", torch.bfloat16, "captured-bf16 needs an NVIDIA or AMD GPU"),
        ("captured-bf16", "cuda", None, "captured-bf16 needs --use-amp with bfloat16"),
        ("captured-bf16", "cuda", torch.float16, "captured-bf16 needs --use-amp with bfloat16"),
    ],
)
def test_a_captured_peer_says_what_it_needs(name, device, amp_dtype, message):
    with pytest.raises(UsageError) as raised:
        external_baselines.PEERS[name].check(torch.device(device), amp_dtype)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name, amp_dtype", [("captured", None), ("captured", torch.float16), ("captured-bf16", torch.bfloat16)])
def test_a_captured_peer_runs_on_a_gpu_where_torch_compile_works(name, amp_dtype, monkeypatch):
    monkeypatch.setattr(devices, "compile_problem", lambda device: None)
    external_baselines.PEERS[name].check(torch.device("cuda"), amp_dtype)
    monkeypatch.setattr(devices, "compile_problem", lambda device: "torch.compile does not work here: no compiler")
    with pytest.raises(UsageError, match="torch.compile does not work here: no compiler"):
        external_baselines.PEERS[name].check(torch.device("cuda"), amp_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, flags", [("captured", []), ("captured", ["--use-amp"]), ("captured-bf16", ["--use-amp"])],
    ids=["captured-fp32", "captured-amp", "captured-bf16"],
)  # fmt: skip
def test_the_step_of_a_captured_peer_is_captured_and_learns(name, flags):
    arguments = [*flags, "--batch-size", "4", "--seq-len", "64", "--device", "cuda"]
    options = version_files.resolve(version_files.parser(None).parse_args(arguments))
    cuda, peer = torch.device("cuda"), external_baselines.PEERS[name]
    devices.prepare(cuda, options.seed)
    torch.use_deterministic_algorithms(False)
    precision, batch = Precision(cuda, torch.bfloat16 if flags else None), version_files.random_batch(options, cuda)
    prepared = steps.prepare(peer, options, precision, batch)
    losses = [prepared.step(batch).item() for _ in range(10)]
    assert isinstance(prepared.step, capture.CapturedStep)
    assert losses[-1] < 0.9 * losses[0] and losses[0] == pytest.approx(6.9, abs=0.3)  # the logarithm of 1000 tokens at first


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["captured", "captured-bf16"])
def test_the_gradients_of_a_captured_peer_are_those_of_version_1(name):
    options = version_files.resolve(version_files.parser(None).parse_args(["--use-amp", "--seq-len", "33", "--device", "cuda"]))
    ours, theirs = (
        accuracy.errors_against_float64(tiny_llama_v1, version, options, [])
        for version in (tiny_llama_v1, external_baselines.PEERS[name])
    )
    assert max(theirs.values()) < 2 * max(ours.values())


@pytest.mark.gpu
def test_liger_has_the_gradients_of_version_1():
    pytest.importorskip("liger_kernel")
    options = version_files.resolve(version_files.parser(None).parse_args(["--seq-len", "33", "--device", "cuda"]))
    errors = accuracy.errors_against_float64(tiny_llama_v1, external_baselines.PEERS["liger"], options, [])
    assert max(errors.values()) < 1e-4
