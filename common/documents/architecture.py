"""The tables of TINY_LLAMA_ARCHITECTURE.md: the formulas of `flops` and `footprint` at the presets, as Markdown."""

from math import prod

from common import config as configs
from common.analysis.formulas import flops, footprint
from common.analysis.formulas.peaks import datasheet
from common.analysis.output.tables import markdown
from common.config import PRESETS, ModelConfig

MIB, MB, MICRO = 2**20, 1e6, 1e6
DEVICES = (  # names that `common.analysis.formulas.peaks` knows: those in the table of balances
    "H100 SXM", "H100 PCIe", "H200 SXM", "NVIDIA B200", "A100-SXM4-80GB", "A100 80GB PCIe", "A100-SXM4-40GB", "RTX 4090",
    "RTX 5090", "MI210", "MI250", "MI250X", "MI300X", "MI300A", "MI325X", "MI350X", "MI355X",
)  # fmt: skip

# One forward pass: the span, the operation, and the shape of its result in the letters of `common.config`.
FORWARD_PASS = (
    ("embed", "`embed_tokens(input_ids)`", "B S D"), ("norm", "`input_layernorm(x)`", "B S D"),
    ("attention", "`q_proj(x)`", "B S D"), ("attention", "`k_proj(x)`, `v_proj(x)`, each", "B S K*Dh"),
    ("attention", "q by heads, rotated", "B H S Dh"), ("attention", "k by heads, rotated; v by heads", "B K S Dh"),
    ("attention", "k, v repeated for the query heads (if `K < H`)", "B H S Dh"),
    ("attention", "scores; softmax weights", "B H S S"), ("attention", "weights @ v", "B H S Dh"),
    ("attention", "`o_proj(heads merged)`", "B S D"), ("residual", "x + attention", "B S D"),
    ("norm", "`post_attention_layernorm(x)`", "B S D"), ("mlp", "`gate_proj(x)`, `up_proj(x)`, silu(gate) * up, each", "B S F"),
    ("mlp", "`down_proj(...)`", "B S D"), ("residual", "x + mlp", "B S D"), ("norm", "`norm(x)`, after the last layer", "B S D"),
    ("loss", "logits, log-probabilities, each", "B S V"), ("loss", "mean cross-entropy", ""),
)  # fmt: skip


def preset(name: str) -> tuple[ModelConfig, int, int]:
    """Model, batch size and sequence length of a preset."""
    resolved = configs.resolve(name)
    return resolved.model, resolved.training.batch_size, resolved.training.sequence_length


def sizes(config: ModelConfig, batch_size: int, sequence_length: int) -> dict[str, int]:
    """Value of each shape letter."""
    return {
        "B": batch_size, "S": sequence_length, "D": config.hidden_size, "H": config.num_attention_heads,
        "K": config.num_key_value_heads, "Dh": config.head_dim, "F": config.intermediate_size, "V": config.vocab_size,
        "L": config.num_layers,
    }  # fmt: skip


def shape(letters: str, values: dict[str, int]) -> list[int]:
    """The sizes that letters stand for: `B S K*Dh` is [8, 128, 256] for the tiny preset's values."""
    return [prod(values[letter] for letter in dimension.split("*")) for dimension in letters.split()]


def presets() -> str:
    """A row per preset, a column per letter."""
    values = {name: sizes(*preset(name)) for name in PRESETS}
    return markdown(["", *values["tiny"]], [[name, *value.values()] for name, value in values.items()])


def shapes() -> str:
    """A row per tensor of a forward pass at the tiny preset."""
    values, rows = sizes(*preset("tiny")), []
    for span, tensor, letters in FORWARD_PASS:
        symbols, numbers = ", ".join(letters.split()).replace("*", " "), shape(letters, values)
        rows.append([span, tensor, f"[{symbols}]", str(numbers), footprint.FLOAT * prod(numbers) / 1024])
    return markdown(["Span", "Tensor", "Shape", "At `tiny`", "KiB in fp32"], rows)


def _by_part(formulas: dict[str, str], values: list[dict[str, int]], unit: float = 1) -> list[list[object]]:
    """A row per part: its name, its formula, and its value in `unit` at each preset."""
    return [[part, text, *(value[part] / unit for value in values)] for part, text in formulas.items()]


def parameters() -> str:
    """A row per part of the model: its number of parameters."""
    formulas = {
        "embedding": "V D (the head shares it)", "attention": "L (2 D^2 + 2 D K Dh)", "mlp": "L 3 D F",
        "norms": "(2 L + 1) D", "total": "P",
    }  # fmt: skip
    return markdown(["Part", "Formula", *PRESETS], _by_part(formulas, [flops.parameters(preset(name)[0]) for name in PRESETS]))


def forward_flops() -> str:
    """GFLOP of the parts of a forward pass, and of a step, at each preset's B and S."""
    formulas = {
        "projections": "2 B S L (2 D^2 + 2 D K Dh)", "attention": "4 B L D S (S + 1) / 2", "mlp": "6 B S L D F",
        "head": "2 B S D V",
    }  # fmt: skip
    shown = [preset(name) for name in PRESETS]
    causal, full = ([flops.forward(*each, causal=flag) for each in shown] for flag in (True, False))
    steps, full_steps = ([flops.training_step(*each, causal=flag) for each in shown] for flag in (True, False))
    rows = _by_part(formulas, causal, 1e9)
    for name, text, values in (
        ("forward, causal", "sum of the above", causal), ("forward, full", "attention: 4 B L D S^2", full),
        ("step, causal", "3 x forward", steps), ("step, full", "3 x forward", full_steps),
    ):  # fmt: skip
        rows.append([name, text, *(value["total"] / 1e9 for value in values)])
    return markdown(["GFLOP", "Formula", *PRESETS], rows)


def states() -> str:
    """MiB that live from step to step."""
    formulas = {"weights": "4 P", "gradients": "4 P", "adamw": "8 P + 4 (9 L + 2)", "total": "16 P + 4 (9 L + 2)"}
    models = [preset(name)[0] for name in PRESETS]
    rows = _by_part(formulas, [footprint.states(model) for model in models], MIB)
    for name, text, count in (
        ("16-bit copies, under autocast", "2 (P - norms)", footprint.autocast_copies),
        ("moved by AdamW's step, at least", "28 P", footprint.optimizer_bytes),
    ):
        rows.append([name, text, *(count(model) / MIB for model in models)])
    return markdown(["MiB", "Bytes", *PRESETS], rows)


def activations() -> str:
    """MiB kept from the forward to the backward pass in float32 and under autocast, and the least peak of a step."""
    formulas = {
        "embed": "8 B S", "norm": "(2 L + 1) (8 B S D + 4 B S)", "attention": "L 20 B S D", "scores": "L (4 B H S^2 + S^2)",
        "mlp": "L (4 B S D + 16 B S F)", "loss": "4 B S D + 4 B S V + 8 B S + 4", "total": "",
    }  # fmt: skip
    shown = [preset(name) for name in PRESETS]
    rows = _by_part(formulas, [footprint.activations(*each) for each in shown], MIB)
    for device, where in (("cpu", "bf16 autocast on a CPU"), ("cuda", "bf16 autocast on a GPU")):
        mixed = [footprint.activations(*each, autocast=device) for each in shown]
        rows += [[f"{part}, {where}", "", *(value[part] / MIB for value in mixed)] for part in ("scores", "total")]
    rows.append(["a step's peak, fp32, at least", "12 P + total", *(footprint.least_peak(*each) / MIB for each in shown)])
    return markdown(["MiB", "Bytes", *PRESETS], rows)


def quadratic() -> str:
    """A row per preset: the share of the S^2 term in the activations, and the S at which it overtakes the rest of its layer."""
    rows = []
    for name in PRESETS:
        config, batch, length = preset(name)
        kept = [footprint.activations(config, batch, s) for s in (length, 4 * length)]
        shares = [f"{value['scores'] / value['total']:.0%}" for value in kept]
        rows.append([name, length, *shares, footprint.quadratic_overtakes(config, batch)])
    return markdown(["Preset", "S", "Share of S^2 at S", "At 4 S", "Overtakes the rest of its layer at S ="], rows)


def intensity() -> str:
    """A row per group of operations of a forward pass: kernels, FLOPs, bytes and FLOP/byte at tiny and at medium."""
    first, second = (footprint.totals(footprint.operations(*preset(name)), "group") for name in ("tiny", "medium"))
    rows = []
    for group in first:
        row = [group, first[group]["kernels"]]
        for values in (first[group], second[group]):
            row += [values["flops"] / MB, values["bytes"] / MB, values["flops"] / values["bytes"]]
        rows.append(row)
    columns = [column for name in ("tiny", "medium") for column in (f"`{name}`: MFLOP", "MB", "FLOP/byte")]
    return markdown(["Group", "Kernels (`tiny`)", *columns], rows)


def peaks_of(device: str) -> dict[str, float]:
    peaks = datasheet(device)
    assert peaks, device
    return peaks


def balance() -> str:
    """A row per device: its data-sheet peaks, and the FLOPs per byte at which they meet."""
    formats, rows = ("fp32", "tf32", "bf16"), []
    for name in DEVICES:
        peaks = peaks_of(name)
        rates = [peaks.get(key) for key in formats]
        ridges = [rate and rate / peaks["bandwidth"] for rate in rates]
        rows.append([name.removeprefix("NVIDIA "), peaks["bandwidth"] / 1e12, *(rate and rate / 1e12 for rate in rates), *ridges])
    columns = ["Device", "TB/s", "TFLOP/s in fp32", "TF32 or XF32", "bf16", "FLOP/byte in fp32", "TF32 or XF32", "bf16"]
    return markdown(columns, rows)


def limits() -> str:
    """A row per preset and device: the least time of a forward pass by all its FLOPs, by all its bytes, and kernel by kernel."""
    rows = []
    for name in PRESETS:
        operations = footprint.operations(*preset(name))
        kernels = sum(operation.calls for operation in operations)
        for device in ("H100 SXM", "MI300X"):
            peaks = peaks_of(device)
            times = [(o.calls, o.flops / peaks["fp32"] * MICRO, o.bytes / peaks["bandwidth"] * MICRO) for o in operations]
            compute = sum(calls * compute for calls, compute, _ in times)
            memory = sum(calls * memory for calls, _, memory in times)
            slower = sum(calls * max(compute, memory) for calls, compute, memory in times)
            rows.append([name, device, kernels, compute, memory, slower, slower / kernels])
    columns = ["Preset", "Device", "Kernels", "FLOPs at peak, us", "Bytes at peak, us", "Kernel by kernel, us", "Per kernel, us"]
    return markdown(columns, rows)


def fusion() -> str:
    """A row per part: bytes of a forward pass, and of one kernel in its place, at tiny and at medium; the quotient is a bound."""
    rows: list[list[object]] = [[name] for name in footprint.ONE_KERNEL]
    columns = ["Part"]
    for name in ("tiny", "medium"):
        eager = footprint.totals(footprint.operations(*preset(name)), "group")
        least = footprint.one_kernel_bytes(*preset(name))
        for row, (part, groups) in zip(rows, footprint.ONE_KERNEL.items(), strict=True):
            moved = sum(eager[group]["bytes"] for group in groups)
            row += [moved / MB, least[part] / MB, moved / least[part]]
        columns += [f"`{name}`: V1, MB", "One kernel, MB", "Bound"]
    return markdown(columns, rows)
