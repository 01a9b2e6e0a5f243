"""Memory by formula against the code: bytes kept, each exactly."""

from argparse import Namespace

from common import config as configs
from common import spans
from common.config import ModelConfig
from common.precision import Precision
from tests.operators import model_and_batch, saved_bytes
from tracepage.cost import footprint
from tracepage.span_names import SPANS
from version1_pytorch_baseline import tiny_llama_v1 as v1

import pytest
import torch


@pytest.fixture
def current_span():
    """A list whose last item is the span that the model is in; `residual` outside of all."""
    stack = ["residual"]

    def observe(name: str, entering: bool) -> None:
        if name in SPANS:
            stack.append(name) if entering else stack.pop()

    spans.observer = observe
    yield stack
    spans.observer = None


def test_bytes_of_weights_gradients_and_adamw(config: ModelConfig) -> None:
    model, *batch = model_and_batch(config, (2, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(*batch).backward()
    optimizer.step()
    measured = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters()),
        "adamw": sum(t.nbytes for state in optimizer.state.values() for t in state.values()),
    }
    assert footprint.states(config) == measured | {"total": sum(measured.values())}


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 7), (3, 17), (4, 33)], ids=str)
def test_activations_by_part(
    config: ModelConfig, shape: tuple[int, int], current_span: list[str]
) -> None:
    model, *batch = model_and_batch(config, shape)
    measured = saved_bytes(config, model, batch, current_span)
    expected = footprint.activations(config, *shape)
    if shape[1] > 1:  # at S = 1 a score cannot be told from other tensors by its shape
        assert {
            part: size for part, size in expected.items() if size and part != "total"
        } == measured
    assert expected["total"] == measured.total()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_activations_under_autocast(
    config: ModelConfig, shape, device: str, current_span: list[str]
) -> None:
    model, *batch = model_and_batch(config, shape, device)
    measured = saved_bytes(config, model, batch, current_span, autocast=device)
    expected = footprint.activations(config, *shape, autocast=device)
    assert {part: size for part, size in expected.items() if part != "total"} == measured


@pytest.mark.parametrize("half", [False, True])
def test_savings_and_the_peaks_with_them(config: ModelConfig, half: bool) -> None:
    """A block's activations are what one more layer keeps, without the casts of its weights."""
    shape, layers, autocast = (2, 9), config.num_layers, "cpu" if half else None
    kept, taller = (
        footprint.activations(config.model_copy(update={"num_layers": count}), *shape, autocast)
        for count in (layers, layers + 1)
    )
    rows = {row[0]: row[2:] for row in footprint.savings(config, *shape, "cpu", half)}
    block = sum(taller[part] - kept[part] for part in ("norm", "attention", "scores", "mlp"))
    residual = 4 * 2 * 9 * config.hidden_size
    saved, peak = rows["blocks computed again"]
    assert saved == (layers - 1) * (block - residual)

    stays, logits = footprint.states(config), 4 * 2 * 9 * config.vocab_size
    backward = stays["weights"] + stays["adamw"] + kept["total"] + 2 * logits
    assert peak == max(backward - saved, stays["total"]) and rows["none"] == (
        0,
        max(backward, stays["total"]),
    )
    assert rows["cross-entropy in parts"][0] == 3 * logits and ("16-bit autocast" in rows) != half
    saved, peak = rows["AdamW's moments in 8 bits"]
    assert saved * 4 == 3 * 2 * stays["weights"] and peak == rows["none"][1] - saved


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, "cuda"])
@pytest.mark.parametrize("shape", [(8, 128), (2, 1024), (1, 16)], ids=str)
def test_peak_of_a_training_step(shape: tuple[int, int], autocast: str | None) -> None:
    config = configs.resolve("small", training=dict(sequence_length=shape[1])).model
    model, *batch = model_and_batch(config, shape, "cuda")
    optimizer = v1.make_optimizer(model, Namespace(learning_rate=1e-3))
    precision = Precision(torch.device("cuda"), torch.bfloat16 if autocast else None)
    step = v1.make_step(model, optimizer, precision)
    for _ in range(3):  # the optimizer's state and the libraries' workspaces exist after the first
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(batch)
    stays = footprint.states(config)
    libraries = before - stays["weights"] - stays["adamw"]
    least = footprint.least_peak(config, *shape, autocast) + libraries
    # the allocator rounds blocks to 512 bytes
    assert least <= torch.cuda.max_memory_allocated() + 2**20 < 1.5 * least
