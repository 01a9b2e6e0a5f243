"""Statistics of every layer's output for one batch: they show where values grow, vanish or become
NaN.

A forward hook reads the output of a module without a change to the model. The rows are in the order
of the computation: the embedding, the attention, feed-forward part and sum (the residual stream) of
each layer, the last norm, the logits. A well initialized model keeps every standard deviation
within a few powers of ten of 1, and its logits are small.
"""

import math
import re
from collections.abc import Callable

from common import data
from common import device as devices
from common.options import RunOptions
from common.precision import Precision, amp_dtype
from common.training import distributed
from tracepage.show import tables

import torch
from torch import Tensor, nn

HEADER = ["output of", "min", "max", "std", "NaN", "std of its weight"]
# The modules that get a row:
WATCHED = re.compile(r"embed_tokens|layers\.\d+(\.self_attn|\.mlp)?|norm|lm_head")


def report(make_model: Callable[..., nn.Module], options: RunOptions) -> str:
    """Loss and statistics of the untrained model for the first batch of its run."""
    device = devices.select(options.device)
    devices.configure(device, options.seed)
    dataset = data.load(options.data, options.model.vocab_size, options.seed)
    shape = options.batch_size, options.seq_len, options.num_steps
    inputs, targets = data.Batches(dataset, shape, options.seed, device)[0]
    model = make_model(options).to(device)
    precision = Precision(device, amp_dtype(options))
    with torch.no_grad(), precision.autocast():
        rows = statistics(model, inputs)
        loss = distributed.Loss(model)(inputs, targets).item()
    uniform = math.log(options.model.vocab_size)
    heading = f"before training: loss {loss:.3f}, a uniform guess costs ln V = {uniform:.3f}"
    return f"{heading}\n\n{tables.text(HEADER, rows)}"


def statistics(model: nn.Module, inputs: Tensor) -> list[list[object]]:
    """Module; min, max, standard deviation and number of NaN of its output; standard deviation of
    its weight, if it is a matrix.

    Args:
        inputs: [B, S] token ids.
    """
    rows: list[list[object]] = []

    def watch(name: str):
        def hook(module: nn.Module, _, output: Tensor | tuple[Tensor, Tensor]) -> None:
            if isinstance(output, tuple):  # the next norm does a layer's last addition
                output = output[1] if name == "norm" else output[0] + output[1]
            weight = getattr(module, "weight", None)
            spread = weight.std().item() if weight is not None and weight.dim() == 2 else None
            values = output.float()
            numbers = values[~values.isnan()]
            low, high, std = (
                f(numbers).item() if len(numbers) else None
                for f in (torch.min, torch.max, torch.std)
            )
            rows.append([name, low, high, std, int(values.isnan().sum()), spread])

        return hook

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if WATCHED.fullmatch(name)
    ]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return rows
