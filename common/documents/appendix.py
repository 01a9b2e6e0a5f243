"""The tables of TECHNICAL_APPENDICES.md: the savings of each fusion by formula, and measured runs beside the formulas.

Bytes count as in `footprint`: every operator reads its inputs once and writes its outputs once, 4 bytes an element. Bytes after a
fusion are a bound: those of one operator that does the same. A test compares both with the operators that PyTorch runs.
In comments t = B S tokens, n = B S D, m = B S K Dh and f = B S F are elements, and p = B H S^2 are scores.
"""

from collections.abc import Callable
from pathlib import Path

from common.analysis.formulas import footprint
from common.analysis.formulas.footprint import FLOAT, HALF
from common.analysis.formulas.fusions import FOREACH_ADAMW, layer_changes
from common.analysis.output import tables
from common.analysis.profiles import load_kernels
from common.config import ModelConfig
from common.documents.architecture import preset
from common.documents.result_tables import baseline_runs, compared, compute, label, table
from common.records import step_profile
from common.records.run_record import TimedRun

MB, MIB = 1e6, 2**20
OUTER, INNER = 128, 64  # rows of the tiles of `tiled_attention`


# ---------------------------------------------------------------------------------------------------------- by formula


def tiled_attention(length: int, head_dim: int) -> dict[str, int]:
    """Elements that causal flash attention moves between memory and chip, for one head (Dao 2023, arXiv:2307.08691).

    Forward (algorithm 1) goes over blocks of OUTER queries and inside over the blocks of INNER keys that the mask leaves;
    backward (algorithm 2) over blocks of OUTER keys and inside over INNER queries, whose gradient it reads and adds to.
    No data stays in a cache between two blocks.
    """
    keys = sum(min(length, -(-min(start + OUTER, length) // INNER) * INNER) for start in range(0, length, OUTER))
    queries = sum(length - start // INNER * INNER for start in range(0, length, OUTER))
    return {
        "forward": length * (2 * head_dim + 1) + keys * 2 * head_dim,  # q, output, log-sum-exp; k and v again for each block
        # rowsum(dO out); k, v, dk, dv; and again for each block q, dO, log-sum-exp, the row sum, dq in and out
        "backward": length * (2 * head_dim + 1) + length * 4 * head_dim + queries * (4 * head_dim + 2),
    }


def product_intensity(rows: int, inner: int, columns: int, element: int = FLOAT, cast_bytes: int = 0) -> float:
    """FLOPs per byte of [rows, inner] x [inner, columns]; `cast_bytes`: the bytes that casting its factors moves in addition."""
    moved = element * (rows * inner + inner * columns + rows * columns) + cast_bytes
    return 2 * rows * inner * columns / moved


def kept_less(config: ModelConfig, batch_size: int, sequence_length: int, autocast: bool, on_gpu: bool) -> dict[str, int]:
    """Bytes that Version 1 keeps between forward and backward pass, and Version 2 with its three default fusions does not.

    Returns:
        Bytes by part: scores, log-sum-exp, casts, views, total. A negative number is kept by Version 2 only.
    """
    layers, tokens = config.num_layers, batch_size * sequence_length
    n, m = tokens * config.hidden_size, tokens * config.num_key_value_heads * config.head_dim
    where = ("cuda" if on_gpu else "cpu") if autocast else None
    width = HALF if autocast else FLOAT
    repeats = on_gpu and not autocast and m < n  # PyTorch's float32 kernel takes no groups, so k and v are repeated as before
    parts = {
        "scores": footprint.activations(config, batch_size, sequence_length, where)["scores"],
        "log-sum-exp": -layers * FLOAT * tokens * config.num_attention_heads,
        "casts": layers * HALF * 3 * n if autocast else 0,  # of the two norms' outputs: one each, and not three and two
        # k and v with K heads, not H; but v is a view, which keeps the whole product for Q, K and V
        "views": 0 if repeats else layers * width * (2 * n - m - (n + 2 * m)),
    }
    return parts | {"total": sum(parts.values())}


def fusion_bytes() -> str:
    """A row per fusion and pass: operators and bytes of a layer before and after, at tiny and medium; the quotient is a bound."""
    small, medium = (layer_changes(*preset(name)) for name in ("tiny", "medium"))
    rows: list[list[object]] = []
    for first, second in zip(small, medium, strict=True):
        row: list[object] = [first.fusion, first.phase, f"{first.operators[0]} to {first.operators[1]}"]
        for before, after in (first.bytes, second.bytes):
            row += [before / MB, after / MB, before / after]
        rows.append(row)
    columns = ["Fusion", "Pass", "Operators", "`tiny`: MB", "after", "bound", "`medium`: MB", "after", "bound"]
    return tables.markdown(columns, rows)


def intensities() -> str:
    """A row per product of the forward pass: its FLOPs per byte, in float32 and under autocast with its casts."""
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
        for product, (inner, outputs) in sizes.items():
            wide = tokens * inner * (product not in ("output", "down"))  # their input has 16 bits already
            casts = (FLOAT + HALF) * (wide + inner * outputs)
            found = [product_intensity(tokens, inner, outputs), product_intensity(tokens, inner, outputs, HALF, casts)]
            rows.setdefault(product, [product]).extend(found)
    columns = ["Product", *(f"`{name}`, {kind}" for name in names for kind in ("fp32", "bf16 with casts"))]
    return tables.markdown(columns, rows.values())


def attention_io() -> str:
    """A row per shape and pass: bytes of a layer's attention in Version 1, in tiles and in a single pass, and FLOPs per byte."""
    rows = []
    for name in ("tiny", "medium", "large"):
        config, batch, length = preset(name)
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
    columns = ["V1, MB", "Tiles, MB", "One pass, MB", "V1 / tiles", "V1, FLOP/byte", "Tiles, FLOP/byte"]
    return tables.markdown(["Preset", "B x S", "Pass", *columns], rows)


# --------------------------------------------------------------------------------------------- measured, beside formulas


def memory_saved(folder: Path) -> str:
    """A row per preset and precision: peak memory of the first two versions, and its difference, measured and by `kept_less`."""
    pairs, rows = [runs[:2] for runs in compared(folder)], []
    for pair in pairs:
        first, peaks = pair[0], [run["memory"]["peak_mib"] for run in pair]
        shape = first["training"]["batch_size"], first["training"]["sequence_length"]
        mixed, on_gpu = compute(first) != "fp32", first["device"]["kind"] != "cpu"
        derived = kept_less(ModelConfig(**first["model"]), *shape, mixed, on_gpu)
        rows.append(
            [
                first["training"]["preset"],
                compute(first),
                *peaks,
                peaks[0] - peaks[1],
                *(value / MIB for value in derived.values()),
            ]
        )
    columns = [*(f"{label(run)}, MiB" for run in pairs[0]), "saved, measured", "scores", "log-sum-exp", "casts", "views"]
    return table(["preset", "precision", *columns, "saved, derived"], rows, *(run for pair in pairs for run in pair))


def _by_preset(folder: Path, columns: list[str], row: Callable[[TimedRun, Path], list[object]]) -> str:
    """A table with a row per preset, made by `row` from the record of a run and the path of its profile."""
    runs = list(baseline_runs(folder))
    rows = [[run["training"]["preset"], *row(run, path)] for run, path in runs]
    return table(["preset", *columns], rows, *(run for run, _ in runs))


def launches(folder: Path) -> str:
    """A row per preset: the launches of a step, and the time of the work and of the step for each of them."""

    def row(run: TimedRun, path: Path) -> list[object]:
        found = load_kernels.load(path)
        kernels, steps = found.table, found.steps
        assert steps, path  # a profile of Version 1 says how many
        is_kernel, split = kernels.category == "kernel", kernels.name.str.contains("splitK")
        per_step = [float(kernels.calls[which].sum()) / steps for which in (is_kernel, is_kernel & split, ~is_kernel)]
        calls, busy = float(kernels.calls.sum()) / steps, float(kernels.duration_ns.sum()) / steps / 1e3
        return [*per_step, busy / calls, 1e3 * run["step_ms"]["median"] / calls]

    columns = ["kernels/step", "of these split-K sums", "copies and fills/step"]
    return _by_preset(folder, [*columns, "us of work per launch", "us of the step per launch"], row)


def amdahl(folder: Path) -> str:
    """A row per preset: shares of a step, and the speed-up if nothing but kernels, or linear layers' products, took time."""

    def row(run: TimedRun, path: Path) -> list[object]:
        profile = step_profile.read(path)
        step_us = 1e3 * run["step_ms"]["median"] * profile["profiled_steps"]
        linear, batched = (
            sum(operator["self_device_us"] for operator in profile["operators"] if operator["name"] == name) / step_us
            for name in ("aten::mm", "aten::bmm")
        )
        busy = profile["device_busy_us"] / step_us
        shares = [100 * share for share in (linear, batched, busy - linear - batched, 1 - busy)]
        return [*shares, 1 / busy, 1 / linear]

    columns = ["linear products %", "attention products %", "other kernels %", "no kernel %"]
    return _by_preset(folder, [*columns, "bound: no waiting", "bound: linear products alone"], row)


def optimizer(folder: Path) -> str:
    """A row per preset: bytes of AdamW's step as PyTorch runs it and in one kernel, and both at the measured copy rate."""

    def row(run: TimedRun, path: Path) -> list[object]:
        profile = step_profile.read(path)
        taken = sum(kernel["device_us"] for kernel in profile["kernels"] if kernel["span"] == "optimizer")
        least = footprint.optimizer_bytes(ModelConfig(**run["model"]))
        moved = FLOAT * sum(FOREACH_ADAMW.values()) * run["parameters"]
        assert run["ceilings"], path
        rate = run["ceilings"]["bytes_per_second"] / 1e3  # bytes per ms
        return [moved / MB, moved / rate, taken / profile["profiled_steps"] / 1e3, least / MB, least / rate]

    columns = ["foreach, MB", "at the copy rate, ms", "kernels, measured, ms", "one kernel, MB", "at the copy rate, ms"]
    return _by_preset(folder, columns, row)


def profiler_cost(*folders: Path) -> str:
    """A row per run: step time in a process without torch.profiler, and in one with it before and while it profiles."""
    rows = []
    for run, path in baseline_runs(*folders):
        profile = step_profile.read(path)
        before, profiled = profile["run"]["step_ms"], sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
        rows.append([run["training"]["preset"], run["device"]["name"], run["step_ms"]["median"], before["median"], profiled])
    columns = ["preset", "device", "a run without it, ms", "before it starts, ms", "under it, ms"]
    return tables.markdown(columns, rows)
