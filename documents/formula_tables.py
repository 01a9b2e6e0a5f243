"""Tables of the formulas of `flops`, `footprint`, `fusions` and `peaks`, at the presets."""

from collections.abc import Mapping, Sequence

from common import config
from common.config import PRESETS, ModelConfig
from tracepage.cost import flops, footprint, peaks
from tracepage.show.tables import markdown

MIB = 2**20
DEVICES = (  # names that `peaks` knows
    "A100-SXM4-80GB",
    "H100 SXM",
    "H200 SXM",
    "NVIDIA B200",
    "RTX 4090",
    "MI210",
    "MI250X",
    "MI300A",
    "MI300X",
    "MI355X",
)


def preset(name: str) -> tuple[ModelConfig, int, int]:
    """Model, batch size and sequence length of a preset."""
    resolved = config.resolve(name)
    return resolved.model, resolved.training.batch_size, resolved.training.sequence_length


SHAPES = [preset(name) for name in PRESETS]


def presets() -> str:
    """A row per preset, a column per letter."""
    rows = []
    for name, (model, batch_size, sequence_length) in zip(PRESETS, SHAPES, strict=True):
        heads = [model.num_attention_heads, model.num_key_value_heads, model.head_dim]
        rest = [model.intermediate_size, model.vocab_size, model.num_layers]
        rows.append([name, batch_size, sequence_length, model.hidden_size, *heads, *rest])
    return markdown(["", "B", "S", "D", "H", "K", "Dh", "F", "V", "L"], rows)


def _by_part(
    head: str, formulas: Mapping[str, str], values: Sequence[Mapping[str, float]], unit: float = 1
) -> str:
    """A row per part: its name, its formula, and its value in `unit` at each preset."""
    rows = []
    for part, text in formulas.items():
        rows.append([part, text, *(value[part] / unit for value in values)])
    return markdown([head, "Formula", *PRESETS], rows)


def parameters() -> str:
    """A row per part of the model: its number of parameters."""
    formulas = {
        "embedding": "V D (the head shares it)",
        "attention": "L (2 D^2 + 2 D K Dh)",
        "mlp": "L 3 D F",
        "norms": "(2 L + 1) D",
        "total": "P",
    }
    return _by_part("Part", formulas, [flops.parameters(model) for model, _, _ in SHAPES])


def forward_flops() -> str:
    """GFLOP of the parts of a forward pass, and of a step, at each preset's B and S."""
    formulas = {
        "projections": "2 B S L (2 D^2 + 2 D K Dh)",
        "attention": "4 B L D S (S + 1) / 2",
        "mlp": "6 B S L D F",
        "head": "2 B S D V",
        "forward, causal": "sum of the above",
        "forward, full": "attention: 4 B L D S^2",
        "step, causal": "3 x forward",
        "step, full": "3 x forward",
    }
    values = []
    for shape in SHAPES:
        counts = flops.forward(*shape)
        for kind in ("causal", "full"):
            step = flops.training_step(*shape, causal=kind == "causal")
            counts |= {f"forward, {kind}": step["forward"], f"step, {kind}": step["total"]}
        values.append(counts)
    return _by_part("GFLOP", formulas, values, 1e9)


def states() -> str:
    """MiB that live from step to step."""
    formulas = {
        "weights": "4 P",
        "gradients": "4 P",
        "adamw": "8 P + 4 (9 L + 2)",
        "total": "16 P + 4 (9 L + 2)",
    }
    return _by_part("MiB", formulas, [footprint.states(model) for model, _, _ in SHAPES], MIB)


def activations() -> str:
    """MiB kept from the forward to the backward pass in float32 and under autocast, and the least
    peak of a step.
    """
    formulas = {
        "embed": "8 B S",
        "norm": "(2 L + 1) (8 B S D + 4 B S)",
        "attention": "L 20 B S D",
        "scores": "L (4 B H S^2 + S^2)",
        "mlp": "L (4 B S D + 16 B S F)",
        "loss": "4 B S D + 4 B S V + 8 B S + 4",
        "total": "",
        "scores, autocast on a GPU": "",
        "total, autocast on a GPU": "",
        "least peak": "12 P + total",
    }
    values = []
    for shape in SHAPES:
        kept = footprint.activations(*shape)
        mixed = footprint.activations(*shape, autocast="cuda")
        for part in ("scores", "total"):
            kept[f"{part}, autocast on a GPU"] = mixed[part]
        values.append(kept | {"least peak": footprint.least_peak(*shape)})
    return _by_part("MiB", formulas, values, MIB)


def balance() -> str:
    """A row per device: its data-sheet peaks, and the FLOPs per byte at which they meet."""
    rows = []
    for name in DEVICES:
        known = peaks.datasheet(name)
        assert known, name
        bandwidth = known["bandwidth"]
        rates = [known.get(key) for key in ("fp32", "tf32", "bf16")]
        peak_rates = [rate and rate / 1e12 for rate in rates]
        ridges = [rate and rate / bandwidth for rate in rates]
        rows.append([name.removeprefix("NVIDIA "), bandwidth / 1e12, *peak_rates, *ridges])
    header = ["Device", "TB/s", "TFLOP/s in fp32", "TF32 or XF32", "bf16"]
    return markdown([*header, "FLOP/byte in fp32", "TF32 or XF32", "bf16"], rows)
