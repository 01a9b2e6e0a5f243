"""Memory of Version 1 by formula: persistent state (weights, gradients, optimizer state), and
activations that the forward pass keeps for the backward pass.

The formulas follow the eager operations of `tiny_llama_v1.py` one by one.
`tests/tracepage/cost/test_footprint.py` checks them to the byte against the tensors that autograd
saves. In comments and docstrings n = B S D and f = B S F are numbers of elements.
"""

from tracepage.cost import flops
from tracepage.cost.flops import Sizes

FLOAT = 4  # bytes of a float32
HALF = 2  # bytes of a float16 or bfloat16
INTEGER = 8  # bytes of a token id


def states(config: Sizes) -> dict[str, int]:
    """Bytes that persist between steps: float32 weights, their gradients, and AdamW's two moments.

    AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) keeps a mean and a mean square per weight,
    and a step counter per tensor. Autocast changes none of these; it copies the matrices for the
    products.
    """
    counted = flops.parameters(config)["total"]
    # 7 matrices and 2 norms a layer, the embedding, the last norm.
    tensors = 9 * config.num_layers + 2
    parts = {
        "weights": FLOAT * counted,
        "gradients": FLOAT * counted,
        "adamw": 2 * FLOAT * counted + FLOAT * tensors,
    }
    return parts | {"total": sum(parts.values())}


def activations(
    config: Sizes, batch_size: int, sequence_length: int, autocast: str | None = None
) -> dict[str, int]:
    """Bytes that autograd keeps between forward and backward, without weights and rotary tables, by
    part: embed, norm, attention (grows with S), scores (grows with S^2), mlp, loss, casts and
    total.

    A tensor that two operations keep counts once, in the part that kept it first. `autocast` is
    None for float32, else the device of the 16-bit run: `cpu` or `cuda`. On CUDA and ROCm autocast
    computes the softmax in float32, so the [B, H, S, S] weights are kept twice: in float32, and in
    16 bits for the product.
    """
    layers = config.num_layers
    length = sequence_length
    tokens = batch_size * length
    n = tokens * config.hidden_size
    f = tokens * config.intermediate_size
    pairs = batch_size * config.num_attention_heads * length**2
    width = HALF if autocast else FLOAT
    # Autocast casts the norm's output for each of Q, K and V anew.
    inputs = {None: 1, "cpu": 3, "cuda": 3}[autocast]
    scores = {None: FLOAT, "cpu": HALF, "cuda": FLOAT + HALF}[autocast]
    parts = {
        "embed": INTEGER * tokens,  # the token ids
        "norm": (2 * layers + 1) * FLOAT * (2 * n + tokens),  # x, x / rms and 1 / rms
        # Input; q, k and v with H heads; output before o_proj.
        "attention": layers * width * (inputs + 4) * n,
        "scores": layers * (scores * pairs + length**2),  # softmax's output; the mask, a byte each
        # Input; gate, up, silu(gate), silu(gate) * up.
        "mlp": layers * width * ((2 if autocast else 1) * n + 4 * f),
        # Input, log p, targets, count.
        "loss": width * n + FLOAT * tokens * config.vocab_size + INTEGER * tokens + FLOAT,
        "casts": 0,
    }
    if autocast:  # all matrices, the head's included, and cos and sin once a layer
        counted = flops.parameters(config)
        parts["casts"] = HALF * (
            counted["total"] - counted["norms"] + layers * 2 * length * config.head_dim
        )
    return parts | {"total": sum(parts.values())}


def least_peak(
    config: Sizes, batch_size: int, sequence_length: int, autocast: str | None = None
) -> int:
    """A lower bound on the peak memory of a training step, in bytes.

    The peak is either at the end of the forward pass (weights, moments and all activations, but no
    gradients, which `zero_grad` released) or in the optimizer (weights, moments and all gradients).
    Temporary tensors of backward and optimizer, and the workspaces of libraries, come on top.
    """
    stays = states(config)
    kept = activations(config, batch_size, sequence_length, autocast)
    return max(stays["weights"] + stays["adamw"] + kept["total"], stays["total"])


def savings(
    config: Sizes, batch_size: int, sequence_length: int, device: str, half: bool
) -> list[tuple[str, str, int, int]]:
    """What each change alone saves: (change, formula, bytes saved, peak with it), the least peak
    first.

    `device` is `cpu` or `cuda`, and `half` whether the run is under 16-bit autocast. The peak is
    where the backward pass begins, with two gradients as large as the logits, or in the optimizer.
    Flash attention keeps a float32 for each row of the scores. Of blocks that are computed again
    one is there as a whole, and of the others their input. Moments in 8 bits (Dettmers et al. 2021,
    arXiv:2110.02861) are counted without their scales.
    """
    layers = config.num_layers
    tokens = batch_size * sequence_length
    kept = activations(config, batch_size, sequence_length, device if half else None)
    mixed = activations(config, batch_size, sequence_length, device)
    logits = FLOAT * tokens * config.vocab_size
    row_sums = FLOAT * layers * tokens * config.num_attention_heads
    norms = kept["norm"] * 2 * layers // (2 * layers + 1)  # without the last norm
    block = (norms + kept["attention"] + kept["scores"] + kept["mlp"]) // layers
    recomputed = (layers - 1) * (block - FLOAT * tokens * config.hidden_size)
    moments = 6 * flops.parameters(config)["total"]
    changes = [
        ("none", "", 0),
        ("flash attention", "scores - 4 L B H S", kept["scores"] - row_sums),
        ("blocks computed again", "(L - 1) (kept by a block - 4 B S D)", recomputed),
        ("cross-entropy in parts", "12 B S V", 3 * logits),
        ("AdamW's moments in 8 bits", "6 P", moments),
    ]
    if not half:
        saved = kept["total"] - mixed["total"]
        changes.append(("16-bit autocast", "total - total, autocast", saved))
    stays = states(config)
    backward = stays["weights"] + stays["adamw"] + kept["total"] + 2 * logits
    rows = []
    for change, formula, saved in changes:
        optimizer = stays["total"] - (saved if formula == "6 P" else 0)
        rows.append((change, formula, saved, max(backward - saved, optimizer)))
    return sorted(rows, key=lambda row: row[-1])
