"""The names of the spans of a training step, the same in every version: `common.spans` marks them,
analyses find them.
"""

FORWARD_SPANS = ("embed", "norm", "attention", "mlp", "loss")
SPANS = (*FORWARD_SPANS, "backward", "optimizer")
INNER_SPANS = {  # name: the span in which it is nested
    "qkv_projection": "attention",
    "attention_core": "attention",
    "output_projection": "attention",
    "gate_up": "mlp",
    "activation": "mlp",
    "down": "mlp",
}
