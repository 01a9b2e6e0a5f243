"""The tables of TECHNICAL_APPENDICES.md: what each fusion removes, by formula, and measured runs beside the formulas.

Bytes count as in `footprint`: every operator reads its inputs once and writes its outputs once, 4 bytes an element. After a
fusion they are a bound: those of one operator that does the same. `tests/test_appendix_tables.py` holds both to what the
dispatcher runs. In comments t = B S tokens, n = B S D, m = B S K Dh and f = B S F are elements, p = B H S^2 scores.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import config as configs
from common.analysis.formulas import footprint
from common.analysis.formulas.footprint import FLOAT, HALF
from common.analysis.output import tables
from common.analysis.profiles import load_kernels, step_profile
from common.analysis.profiles.run_record import SCHEMA as RUN_SCHEMA
from common.config import PRESETS, ModelConfig
from common.documents.measured import COMPARED
from common.errors import UsageError
from common.files import read_json
from common.studies import ablation

MB, MIB = 1e6, 2**20
OUTER, INNER = 128, 64  # rows of the tiles of `tiled_attention`

# Elements that PyTorch's `foreach` AdamW moves for each weight, operator by operator; a fused kernel moves 7.
FOREACH_ADAMW = {"mul_": 2, "lerp_": 3, "mul_ (square)": 2, "addcmul_": 3, "sqrt": 2, "div_": 2, "add_": 2, "addcdiv_": 4}

Shape = tuple[ModelConfig, int, int]  # model, B, S


class Change(NamedTuple):
    """One fusion in one pass over one layer: operators and float32 bytes, (before, after)."""

    fusion: str
    phase: str
    operators: tuple[int, int]
    bytes: tuple[int, int]


def preset(name: str) -> Shape:
    resolved = configs.resolve(name)
    return resolved.model, resolved.training.batch_size, resolved.training.sequence_length


# ---------------------------------------------------------------------------------------------------------- by formula


def layer_changes(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Change]:
    """What each fusion changes in one layer of Version 1, forward and backward, for B, H and S above 1.

    The output projection and the down projection stay as they are; with them the numbers before add up to the layer.
    """
    layers, hidden, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    tokens, kv_size = batch_size * sequence_length, config.num_key_value_heads * config.head_dim
    n, m, f, table = tokens * hidden, tokens * kv_size, tokens * ffn, sequence_length * config.head_dim
    rows = tokens * config.num_attention_heads
    grouped = config.num_key_value_heads < config.num_attention_heads
    eager = footprint.totals(footprint.operations(config, batch_size, sequence_length), "group")
    core = sum(eager[group]["bytes"] for group in footprint.ONE_KERNEL["attention core"]) // layers
    one_core = footprint.one_kernel_bytes(config, batch_size, sequence_length)["attention core"] // layers
    # Backward: 4 products; derivatives of softmax, mask and scale; a copy of the output's gradient, and of those of q, k and v;
    # with K < H two sums over the query heads that share a head.
    back = FLOAT * (11 * rows * sequence_length + 12 * n + 4 * m + (2 * (n + m) if grouped else 0)) + sequence_length**2
    one_back = FLOAT * (4 * n + 4 * m + rows)  # q, k, v, output, its gradient, log-sum-exp in; three gradients out
    return [
        *_joined("Q, K, V: one product", tokens, hidden, (hidden, kv_size, kv_size)),
        Change("RoPE", "forward", (10, 1), (FLOAT * (10 * (n + m) + 4 * table), FLOAT * 2 * (n + m + table))),
        Change("RoPE", "backward", (10, 1), (FLOAT * (10 * (n + m) + 4 * table), FLOAT * 2 * (n + m + table))),
        Change("flash attention", "forward", (11, 1), (core, one_core)),
        Change("flash attention", "backward", (13 if grouped else 11, 1), (back, one_back)),
        *_joined("gate, up: one product", tokens, hidden, (ffn, ffn)),
        Change("SwiGLU", "forward", (2, 1), (FLOAT * 5 * f, FLOAT * 3 * f)),
        Change("SwiGLU", "backward", (3, 1), (FLOAT * 9 * f, FLOAT * 5 * f)),
        _twice("forward", 7, 10 * n + 6 * tokens + hidden, 4 * n + tokens + hidden),
        _twice("backward", 15, 26 * n + 10 * tokens + 2 * hidden, 4 * n + tokens + 2 * hidden),
    ]


def _twice(phase: str, operators: int, before: int, after: int) -> Change:
    return Change("residual + RMSNorm, twice", phase, (2 * operators, 2), (2 * FLOAT * before, 2 * FLOAT * after))


def _joined(fusion: str, tokens: int, inputs: int, outputs: tuple[int, ...]) -> Iterator[Change]:
    """Products of one input [tokens, inputs] with several weights [inputs, output], against one with all of them.

    Backward, each product has two. Before, the gradients of the input are added up; after, those of the outputs are joined.
    """
    parts, x, w, y = len(outputs), tokens * inputs, inputs * sum(outputs), tokens * sum(outputs)
    apart, one = parts * x + w + y, x + w + y
    yield Change(fusion, "forward", (parts, 1), (FLOAT * apart, FLOAT * one))
    before, after = 2 * apart + (parts - 1) * 3 * x, 2 * one + 2 * y
    yield Change(fusion, "backward", (3 * parts - 1, 3), (FLOAT * before, FLOAT * after))


def tiled_attention(length: int, head_dim: int) -> dict[str, int]:
    """Elements that causal flash attention moves between memory and chip, for one head (Dao 2023, arXiv:2307.08691).

    Forward (algorithm 1) goes over blocks of OUTER queries and inside over the blocks of INNER keys that the mask leaves;
    backward (algorithm 2) over blocks of OUTER keys and inside over INNER queries, whose gradient it reads and adds to.
    Nothing is taken to stay in a cache between two blocks.
    """
    keys = sum(min(length, -(-min(start + OUTER, length) // INNER) * INNER) for start in range(0, length, OUTER))
    queries = sum(length - start // INNER * INNER for start in range(0, length, OUTER))
    return {
        "forward": length * (2 * head_dim + 1) + keys * 2 * head_dim,  # q, output, log-sum-exp; k and v again for each block
        # rowsum(dO out); k, v, dk, dv; and again for each block q, dO, log-sum-exp, the row sum, dq in and out
        "backward": length * (2 * head_dim + 1) + length * 4 * head_dim + queries * (4 * head_dim + 2),
    }


def product_intensity(rows: int, inner: int, columns: int, element: int = FLOAT, cast_bytes: int = 0) -> float:
    """FLOPs per byte of [rows, inner] x [inner, columns]; `cast_bytes`: what making its factors moves besides."""
    moved = element * (rows * inner + inner * columns + rows * columns) + cast_bytes
    return 2 * rows * inner * columns / moved


def kept_less(config: ModelConfig, batch_size: int, sequence_length: int, autocast: bool, on_gpu: bool) -> dict[str, int]:
    """Bytes that Version 2 with its three default fusions keeps less than Version 1 between forward and backward.

    Returns:
        scores, log-sum-exp, casts, views, total; a negative number is kept in addition.
    """
    layers, tokens = config.num_layers, batch_size * sequence_length
    n, m = tokens * config.hidden_size, tokens * config.num_key_value_heads * config.head_dim
    where = ("cuda" if on_gpu else "cpu") if autocast else None
    width = HALF if autocast else FLOAT
    repeats = on_gpu and not autocast and m < n  # PyTorch's float32 kernel takes no groups, so k and v are repeated as before
    parts = {
        "scores": footprint.activations(config, batch_size, sequence_length, where)["scores"],
        "log-sum-exp": -layers * FLOAT * tokens * config.num_attention_heads,
        "casts": layers * HALF * 3 * n if autocast else 0,  # of the norms' outputs: one and one, not three and two
        # k and v with K heads, not H; but v is a view, which keeps the whole product for Q, K and V
        "views": 0 if repeats else layers * width * (2 * n - m - (n + 2 * m)),
    }
    return parts | {"total": sum(parts.values())}


def fusion_bytes() -> str:
    """Operators and bytes of each fusion before and after, one layer, at tiny and at medium; the quotient is a bound."""
    small, medium = (layer_changes(*preset(name)) for name in ("tiny", "medium"))
    rows: list[list[object]] = []
    for first, second in zip(small, medium, strict=True):
        row: list[object] = [first.fusion, first.phase, f"{first.operators[0]} to {first.operators[1]}"]
        for before, after in (first.bytes, second.bytes):
            row += [before / MB, after / MB, before / after]
        rows.append(row)
    header = ["Fusion", "Pass", "Operators", "`tiny`: MB", "after", "bound", "`medium`: MB", "after", "bound"]
    return tables.markdown(header, rows)


def intensities() -> str:
    """FLOPs per byte of each forward product, in float32 and under autocast with its casts."""
    names = ("tiny", "medium", "large")
    rows: dict[str, list[object]] = {}
    for name in names:
        config, batch, length = preset(name)
        hidden, ffn, tokens = config.hidden_size, config.intermediate_size, batch * length
        small = config.num_key_value_heads * config.head_dim
        sizes = {
            "Q": (hidden, hidden), "K, V, each": (hidden, small), "Q, K, V in one": (hidden, hidden + 2 * small),
            "output": (hidden, hidden), "gate, up, each": (hidden, ffn), "gate, up in one": (hidden, 2 * ffn),
            "down": (ffn, hidden), "head": (hidden, config.vocab_size),
        }  # fmt: skip
        for product, (inner, columns) in sizes.items():
            wide = tokens * inner * (product not in ("output", "down"))  # their input has 16 bits already
            casts = (FLOAT + HALF) * (wide + inner * columns)
            found = [product_intensity(tokens, inner, columns), product_intensity(tokens, inner, columns, HALF, casts)]
            rows.setdefault(product, [product]).extend(found)
    header = ["Product", *(f"`{name}`, {kind}" for name in names for kind in ("fp32", "bf16 with casts"))]
    return tables.markdown(header, rows.values())


def attention_io() -> str:
    """Bytes of attention in one layer: Version 1, tiles, one pass over inputs and outputs; and FLOPs per byte."""
    shapes = [(name, preset(name)) for name in PRESETS]
    config, batch, length = preset("medium")
    shapes += [("medium", (config, batch * length // longer, longer)) for longer in (1024, 4096)]
    rows = []
    for name, (config, batch, length) in shapes:
        tiles = tiled_attention(length, config.head_dim)
        for change in layer_changes(config, batch, length):
            if change.fusion == "flash attention":
                eager, least = change.bytes
                tiled = FLOAT * batch * config.num_attention_heads * tiles[change.phase]
                pair = 2 * batch * config.hidden_size  # FLOPs of one of the products for one pair of positions
                executed, causal = (4, 5) if change.phase == "backward" else (2, 2)
                dense, needed = executed * pair * length**2, causal * pair * length * (length + 1) // 2
                rows.append([
                    name, f"{batch} x {length}", change.phase, eager / MB, tiled / MB, least / MB, eager / tiled,
                    dense / eager, needed / tiled,
                ])  # fmt: skip
    header = ["Preset", "B x S", "Pass", "V1, MB", "Tiles, MB", "One pass, MB", "V1 / tiles", "V1, FLOP/byte", "Tiles, FLOP/byte"]
    return tables.markdown(header, rows)


# --------------------------------------------------------------------------------------------- measured, beside formulas


def _measured(folder: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Preset, record of the run, and path of the profile, for each preset that Version 1 was measured at."""
    found = [name for name in PRESETS if (folder / f"v1_{name}.json").exists()]
    if not found:
        raise UsageError(f"no v1_*.json in {folder}: measure with results/measure_v1.sh {folder.name}")
    for name in found:
        yield name, read_json(folder / f"v1_{name}.json", RUN_SCHEMA), folder / f"v1_{name}_profile.json"


def _compared(folder: Path) -> Iterator[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Preset, precision, and record of each version, where Version 1 and Version 2 were measured."""
    cases = [(name, kind, folder / f"compare_{name}_{kind}") for name in PRESETS for kind in ("fp32", "bf16")]
    found = [case for case in cases if all(Path(f"{case[2]}_{what}.json").exists() for what in ("v1", "v2"))]
    if not found:
        raise UsageError(f"no compare_*_v1.json and _v2.json in {folder}: measure with results/measure_versions.sh {folder.name}")
    for name, kind, start in found:
        paths = {what: Path(f"{start}_{what}.json") for what in COMPARED}
        yield name, kind, {what: read_json(path, RUN_SCHEMA) for what, path in paths.items() if path.exists()}


def rates(folder: Path) -> str:
    """Throughput and utilisation of the runs in compare_*.json."""
    rows = [
        [name, precision, COMPARED[what], run["tokens_per_second"], run["flops_per_second"] / 1e12,
         100 * run["mfu"]["utilization"] if run["mfu"] else None]
        for name, precision, runs in _compared(folder)
        for what, run in runs.items()
    ]  # fmt: skip
    return tables.markdown(["preset", "precision", "run", "tokens/s", "TFLOP/s", "MFU %"], rows)


def memory_saved(folder: Path) -> str:
    """Peak memory of Version 1 less that of Version 2, measured and by `kept_less`."""
    rows = []
    for name, precision, runs in _compared(folder):
        peaks = [runs[what]["memory"]["peak_mib"] for what in ("v1", "v2")]
        training, on_gpu = runs["v1"]["training"], runs["v1"]["device"]["kind"] != "cpu"
        config = ModelConfig(**runs["v1"]["model"])
        derived = kept_less(config, training["batch_size"], training["sequence_length"], precision != "fp32", on_gpu)
        rows.append([name, precision, *peaks, peaks[0] - peaks[1], *(value / MIB for value in derived.values())])
    header = ["preset", "precision", "Version 1, MiB", "Version 2, MiB", "saved, measured"]
    header += ["scores", "log-sum-exp", "casts", "views", "saved, derived"]
    return tables.markdown(header, rows)


def launch_counts(folder: Path) -> str:
    """Launches of Version 1 in a step, and how much work each brings."""
    rows = []
    for name, run, path in _measured(folder):
        found = load_kernels.load(path)
        table, steps = found.table, found.steps
        is_kernel, split = table.category == "kernel", table.name.str.contains("splitK")
        per_step = [float(table.calls[which].sum()) / steps for which in (is_kernel, is_kernel & split, ~is_kernel)]
        calls, busy = float(table.calls.sum()) / steps, float(table.duration_ns.sum()) / steps / 1e3
        rows.append([name, *per_step, busy / calls, 1e3 * run["step_ms"]["median"] / calls])
    header = ["preset", "kernels/step", "of these split-K sums", "copies and fills/step", "us of work per launch",
              "us of the step per launch"]  # fmt: skip
    return tables.markdown(header, rows)


def amdahl(folder: Path) -> str:
    """Shares of Version 1's step, and the speed-up if all but the linear layers' products took no time."""
    rows = []
    for name, run, path in _measured(folder):
        profile = step_profile.read(path)
        step = 1e3 * run["step_ms"]["median"] * profile["profiled_steps"]
        own = {"mm": 0.0, "bmm": 0.0}
        for operator in profile["operators"]:
            kind = operator["name"].removeprefix("aten::")
            if kind in own:
                own[kind] += operator["self_device_us"] / step
        busy = profile["device_busy_us"] / step
        shares = [own["mm"], own["bmm"], busy - own["mm"] - own["bmm"], 1 - busy]
        rows.append([name, *(100 * share for share in shares), 1 / busy, 1 / own["mm"]])
    header = ["preset", "linear products %", "attention products %", "other kernels %", "no kernel %", "bound: no waiting",
              "bound: linear products alone"]  # fmt: skip
    return tables.markdown(header, rows)


def optimizer(folder: Path) -> str:
    """Bytes of AdamW's step as PyTorch runs it and in one kernel, and the time of both at the measured copy rate."""
    rows = []
    for name, run, path in _measured(folder):
        profile = step_profile.read(path)
        taken = sum(kernel["device_us"] for kernel in profile["kernels"] if kernel["span"] == "optimizer")
        least = footprint.optimizer_bytes(ModelConfig(**run["model"]))
        moved = FLOAT * sum(FOREACH_ADAMW.values()) * run["parameters"]
        rate = run["ceilings"]["bytes_per_second"] / 1e3  # bytes per ms
        rows.append([name, moved / MB, moved / rate, taken / profile["profiled_steps"] / 1e3, least / MB, least / rate])
    header = ["preset", "foreach, MB", "at the copy rate, ms", "kernels, measured, ms", "one kernel, MB", "at the copy rate, ms"]
    return tables.markdown(header, rows)


def profiler_cost(*folders: Path) -> str:
    """Step time with and without torch.profiler: in a process without it, and in one that profiles some of its few steps."""
    rows = []
    for folder in folders:
        for name, run, path in _measured(folder):
            profile = step_profile.read(path)
            before, profiled = profile["run"]["step_ms"], sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
            rows.append([name, run["device"]["name"], run["step_ms"]["median"], before["median"], profiled])
    header = ["preset", "device", "a run without it, ms", "before it starts, ms", "under it, ms"]
    return tables.markdown(header, rows)


def effects(folder: Path) -> str:
    """Each fusion's own effect, at every preset and precision with a v2_ablation_<preset>_<precision>.json."""
    header, rows = [], []
    for preset in PRESETS:
        for precision in ("fp32", "bf16"):
            path = folder / f"v2_ablation_{preset}_{precision}.json"
            if path.exists():
                measured = read_json(path, ablation.SCHEMA)
                header, body = ablation.effect_table(measured, ablation.effects(measured["combinations"]))
                rows += [[preset, precision, *row] for row in body]
    if not rows:
        raise UsageError(f"no v2_ablation_*.json in {folder}: measure with results/measure_versions.sh {folder.name}")
    return tables.markdown(["preset", "precision", *header], rows)


TABLES: dict[str, Callable[..., str]] = {
    "fusion_bytes": fusion_bytes,
    "intensities": intensities,
    "attention_io": attention_io,
    "rates": rates,
    "memory_saved": memory_saved,
    "launches": launch_counts,
    "amdahl": amdahl,
    "optimizer": optimizer,
    "profiler_cost": profiler_cost,
    "effects": effects,
}
