"""The tables of TINY_LLAMA_ARCHITECTURE.md: the formulas of `flops` and `footprint` at the presets, as Markdown.

Each table is a function without arguments, listed by name in TABLES; the document holds its text between the markers
`<!-- table: NAME -->` and `<!-- /table -->`.
"""

from collections.abc import Callable
from math import prod

from common import config as configs
from common.analysis.formulas import flops, footprint
from common.analysis.formulas.peaks import datasheet
from common.analysis.output.tables import markdown
from common.config import PRESETS, ModelConfig

MIB, MB, MICRO = 2**20, 1e6, 1e6
DEVICES = ("H100 SXM", "H200 SXM", "A100-SXM4-80GB", "MI300X", "MI300A")  # names that `common.analysis.formulas.peaks` knows

# One forward pass: where, what, and the shape of what comes out, in the letters of `common.config`.
FORWARD_PASS = (
    ("embed", "`embed_tokens(input_ids)`", "B S D"),
    ("norm", "`input_layernorm(x)`", "B S D"),
    ("attention", "`q_proj(x)`", "B S D"),
    ("attention", "`k_proj(x)`, `v_proj(x)`, each", "B S K*Dh"),
    ("attention", "q by heads, rotated", "B H S Dh"),
    ("attention", "k by heads, rotated; v by heads", "B K S Dh"),
    ("attention", "k, v repeated for the query heads (if K < H)", "B H S Dh"),
    ("attention", "scores; softmax weights", "B H S S"),
    ("attention", "weights @ v", "B H S Dh"),
    ("attention", "`o_proj(heads merged)`", "B S D"),
    ("residual", "x + attention", "B S D"),
    ("norm", "`post_attention_layernorm(x)`", "B S D"),
    ("mlp", "`gate_proj(x)`, `up_proj(x)`, silu(gate) * up, each", "B S F"),
    ("mlp", "`down_proj(...)`", "B S D"),
    ("residual", "x + mlp", "B S D"),
    ("norm", "`norm(x)`, after the last layer", "B S D"),
    ("loss", "logits, log-probabilities, each", "B S V"),
    ("loss", "mean cross-entropy", ""),
)


def _presets() -> list[tuple[ModelConfig, int, int]]:
    """Model, batch size and sequence length of each preset."""
    resolved = [configs.resolve(name) for name in PRESETS]
    return [(item.model, item.training.batch_size, item.training.sequence_length) for item in resolved]


def sizes(config: ModelConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Value of each shape letter."""
    return {
        "B": batch_size, "S": sequence_length, "D": config.hidden_size, "H": config.num_attention_heads,
        "K": config.num_key_value_heads, "Dh": config.head_dim, "F": config.intermediate_size, "V": config.vocab_size,
        "L": config.num_layers,
    }  # fmt: skip


def shape(letters: str, values: dict[str, int]) -> list[int]:
    """The numbers behind the letters: `B S K*Dh` is [8, 128, 256] for the tiny preset's values."""
    return [prod(values[letter] for letter in dimension.split("*")) for dimension in letters.split()]


def presets() -> str:
    """The letters at each preset."""
    values = [sizes(*preset) for preset in _presets()]
    rows = [[letter, *(value[letter] for value in values)] for letter in values[0]]
    return markdown(["", *PRESETS], rows)


def shapes() -> str:
    """One forward pass of the tiny preset, tensor by tensor."""
    values = sizes(*_presets()[0])
    rows = []
    for span, tensor, letters in FORWARD_PASS:
        symbols = ", ".join(dimension.replace("*", " ") for dimension in letters.split())
        numbers = shape(letters, values)
        rows.append([span, tensor, f"[{symbols}]", str(numbers), footprint.FLOAT * prod(numbers) / 1024])
    return markdown(["Span", "Tensor", "Shape", "At `tiny`", "KiB in fp32"], rows)


def parameters() -> str:
    formulas = {
        "embedding": "V D (the head shares it)", "attention": "L (2 D^2 + 2 D K Dh)", "mlp": "L 3 D F",
        "norms": "(2 L + 1) D", "total": "P",
    }  # fmt: skip
    values = [flops.parameters(config) for config, _, _ in _presets()]
    return markdown(["Part", "Formula", *PRESETS], [[part, text, *(v[part] for v in values)] for part, text in formulas.items()])


def forward_flops() -> str:
    """GFLOP of the forward pass by part, and of a step, at each preset's B and S."""
    formulas = {
        "projections": "2 B S L (2 D^2 + 2 D K Dh)", "attention": "4 B L D S (S + 1) / 2", "mlp": "6 B S L D F",
        "head": "2 B S D V",
    }  # fmt: skip
    causal, full = ([flops.forward(*preset, causal=flag) for preset in _presets()] for flag in (True, False))
    steps, executed = ([flops.training_step(*preset, causal=flag)["total"] for preset in _presets()] for flag in (True, False))
    rows = [[part, text, *(value[part] / 1e9 for value in causal)] for part, text in formulas.items()]
    rows += [
        ["forward, causal", "sum of the above", *(value["total"] / 1e9 for value in causal)],
        ["forward, full", "attention: 4 B L D S^2", *(value["total"] / 1e9 for value in full)],
        ["step, causal", "3 x forward", *(value / 1e9 for value in steps)],
        ["step, full", "3 x forward", *(value / 1e9 for value in executed)],
    ]
    return markdown(["GFLOP", "Formula", *PRESETS], rows)


def states() -> str:
    """MiB that live from step to step."""
    formulas = {"weights": "4 P", "gradients": "4 P", "adamw": "8 P + 4 (9 L + 2)", "total": "16 P + 4 (9 L + 2)"}
    values = [footprint.states(config) for config, _, _ in _presets()]
    rows = [[part, text, *(value[part] / MIB for value in values)] for part, text in formulas.items()]
    copies = [footprint.autocast_copies(config) / MIB for config, _, _ in _presets()]
    moved = [footprint.optimizer_bytes(config) / MIB for config, _, _ in _presets()]
    rows += [["16-bit copies, under autocast", "2 (P - norms)", *copies], ["moved by AdamW's step, at least", "28 P", *moved]]
    return markdown(["MiB", "Bytes", *PRESETS], rows)


def activations() -> str:
    """MiB kept from forward to backward in float32 and under autocast, and what a step's peak follows from it."""
    formulas = {
        "embed": "8 B S", "norm": "(2 L + 1) (8 B S D + 4 B S)", "attention": "L 20 B S D", "scores": "L (4 B H S^2 + S^2)",
        "mlp": "L (4 B S D + 16 B S F)", "loss": "4 B S D + 4 B S V + 8 B S + 4", "total": "",
    }  # fmt: skip
    values = [footprint.activations(*preset) for preset in _presets()]
    rows = [[part, text, *(value[part] / MIB for value in values)] for part, text in formulas.items()]
    for device, name in (("cpu", "bf16 autocast on a CPU"), ("cuda", "bf16 autocast on a GPU")):
        mixed = [footprint.activations(*preset, autocast=device) for preset in _presets()]
        rows.append([f"scores, {name}", "", *(value["scores"] / MIB for value in mixed)])
        rows.append([f"total, {name}", "", *(value["total"] / MIB for value in mixed)])
    peaks = [footprint.least_peak(*preset) / MIB for preset in _presets()]
    rows.append(["a step's peak, fp32, at least", "12 P + total", *peaks])
    return markdown(["MiB", "Bytes", *PRESETS], rows)


def quadratic() -> str:
    """Share of the S^2 term in the activations, and where it overtakes the rest of its layer."""
    rows = []
    for name, (config, batch, length) in zip(PRESETS, _presets(), strict=True):
        kept = [footprint.activations(config, batch, s) for s in (length, 4 * length)]
        shares = [f"{value['scores'] / value['total']:.0%}" for value in kept]
        rows.append([name, length, *shares, footprint.quadratic_overtakes(config, batch)])
    return markdown(["Preset", "S", "Share of S^2 at S", "At 4 S", "Overtakes the rest of its layer at S ="], rows)


def intensity() -> str:
    """Kernels, FLOPs, bytes and FLOP/byte of the forward pass by group, at tiny and at medium."""
    first, second = (footprint.totals(footprint.operations(*preset), "group") for preset in (_presets()[0], _presets()[2]))
    rows = []
    for group in first:
        row = [group, first[group]["kernels"]]
        for values in (first[group], second[group]):
            row += [values["flops"] / MB, values["bytes"] / MB, values["flops"] / values["bytes"]]
        rows.append(row)
    header = ["Group", "Kernels (`tiny`)"]
    for name in ("tiny", "medium"):
        header += [f"`{name}`: MFLOP", "MB", "FLOP/byte"]
    return markdown(header, rows)


def balance() -> str:
    """FLOPs per byte at which a device's data-sheet peaks meet."""
    rows = []
    for name in DEVICES:
        peaks = datasheet(name)
        rows.append([name, peaks["bandwidth"] / 1e12, *(peaks[key] / peaks["bandwidth"] for key in ("fp32", "tf32", "bf16"))])
    return markdown(["Device", "TB/s", "FLOP/byte in fp32", "TF32 or XF32", "bf16"], rows)


def limits() -> str:
    """What the forward pass of each preset costs at least on a device: all its FLOPs, all its bytes, or kernel by kernel."""
    rows = []
    for name, preset in zip(PRESETS, _presets(), strict=True):
        operations = footprint.operations(*preset)
        kernels = sum(operation.calls for operation in operations)
        for device in ("H100 SXM", "MI300X"):
            peaks = datasheet(device)
            times = [(o.calls, o.flops / peaks["fp32"] * MICRO, o.bytes / peaks["bandwidth"] * MICRO) for o in operations]
            compute = sum(calls * compute for calls, compute, _ in times)
            memory = sum(calls * memory for calls, _, memory in times)
            slower = sum(calls * max(compute, memory) for calls, compute, memory in times)
            rows.append([name, device, kernels, compute, memory, slower, slower / kernels])
    header = ["Preset", "Device", "Kernels", "FLOPs at peak, us", "Bytes at peak, us", "Kernel by kernel, us", "Per kernel, us"]
    return markdown(header, rows)


def fusion() -> str:
    """Bytes of the forward pass against one kernel each, at tiny and at medium; the quotient bounds the gain."""
    rows = [[name] for name in footprint.ONE_KERNEL]
    for preset in (_presets()[0], _presets()[2]):
        eager = footprint.totals(footprint.operations(*preset), "group")
        least = footprint.one_kernel_bytes(*preset)
        for row, (name, groups) in zip(rows, footprint.ONE_KERNEL.items(), strict=True):
            moved = sum(eager[group]["bytes"] for group in groups)
            row += [moved / MB, least[name] / MB, moved / least[name]]
    header = ["Part"]
    for name in ("tiny", "medium"):
        header += [f"`{name}`: V1, MB", "One kernel, MB", "Bound"]
    return markdown(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "shapes": shapes,
    "parameters": parameters,
    "flops": forward_flops,
    "states": states,
    "activations": activations,
    "quadratic": quadratic,
    "intensity": intensity,
    "balance": balance,
    "limits": limits,
    "fusion": fusion,
}
