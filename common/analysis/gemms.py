"""What the timed matrix products say: achieved rate, roofline bound, share of the step, and what fusing could gain.

For C [M, N] = A [M, K] @ B [K, N], `batch` times, with numbers of e bytes:

    work        2 batch M N K                           FLOP
    traffic     e batch (M K + K N + M N)               bytes: inputs read once, output written once
    intensity   work / traffic                          FLOP/byte
    bound       min(peak, intensity x bandwidth)        FLOP/s: the roofline (Williams, Waterman and Patterson 2009,
                                                        "Roofline", doi:10.1145/1498765.1498785)

Peak and bandwidth are the measured ceilings of the same device and precision. A product cannot be faster than any of three
times: work / peak, traffic / bandwidth, and what it costs to issue one operation. The longest of the three is its limit:
compute, memory or launch. Operands that stay in a cache between two repetitions can beat the memory bound.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from common.analysis import operators, plots, roofline, tables
from common.files import read_json, write_text

SCHEMA = "tiny-llama-gemms/1"

# Kinds of product in the plots: the products of each, its colour and its marker.
KINDS = {
    "Q, K, V projections": (("q_proj", "k_proj", "v_proj"), plots.BLUE, "o"),
    "attention products": (("scores", "weighted_sum"), plots.ORANGE, "s"),
    "output projection": (("o_proj",), plots.SKY, "v"),
    "gate, up projections": (("gate_proj", "up_proj"), plots.GREEN, "^"),
    "down projection": (("down_proj",), plots.PURPLE, "D"),
    "LM head": (("lm_head",), plots.VERMILION, "P"),
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PHASES = ("forward", "input_grad", "weight_grad")
DETAILS = {  # heading of a table: key of a row
    "GEMM": "gemm", "phase": "phase", "batch": "batch", "M": "m", "N": "n", "K": "k", "layout": "layout", "per step": "per_step",
    "ms": "ms", "p20": "p20", "p80": "p80", "samples": "samples", "calls": "calls", "TFLOP/s": "tflops",
    "FLOP/byte": "intensity", "bound TFLOP/s": "bound_tflops", "% of GEMM ceiling": "ceiling_percent", "limit": "limit",
    "% of GEMM time": "share_percent",
}  # fmt: skip


def analyze(path: Path, folder: Path) -> str:
    """Reads gemm_analysis.json and writes gemm_analysis.csv, .md and .png into `folder`.

    Returns:
        The summary for the terminal.

    Raises:
        UsageError: the file is not a complete one of schema tiny-llama-gemms/1.
    """
    measured = read_json(path, SCHEMA)
    rows = describe(measured)
    write_text(folder / "gemm_analysis.csv", tables.csv_text(list(rows[0]), (row.values() for row in rows)))
    write_text(folder / "gemm_analysis.md", report(measured, rows))
    plot(measured, rows, folder / "gemm_analysis.png")
    parts = [
        _conditions(measured),
        tables.text(*_grid_table(rows)),
        "fusing, ms for all in a step (separate / fused > 1: fused is faster):",
        tables.text(*_fusion_table(measured)),
        _doubts(_shapes(rows)),
        f"written: {', '.join(str(folder / f'gemm_analysis.{kind}') for kind in ('json', 'csv', 'md', 'png'))}",
    ]
    return "\n\n".join(parts)


def describe(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per product of the step and grid point: its shape, times (ms), rates and limit, by the formulas above."""
    ceilings, size = measured["ceilings"], measured["element_bytes"]
    peak, bandwidth = ceilings["flops_per_second"], ceilings["bytes_per_second"]
    totals = {key: _step_ms(gemms) for key, gemms in _by_grid_point(measured["gemms"]).items()}
    rows = []
    for gemm in measured["gemms"]:
        batch, m, n, k = gemm["batch"], gemm["m"], gemm["n"], gemm["k"]
        work, traffic = 2 * batch * m * n * k, size * batch * (m * k + k * n + m * n)
        ms = gemm["ms"]["median"]
        shape = {key: gemm[key] for key in ("batch_size", "sequence_length", "gemm", "phase", "batch", "m", "n", "k", "layout")}
        rows.append(
            shape
            | {
                "per_step": gemm["per_step"],
                "ms": ms,
                "p20": gemm["ms"]["p20"],
                "p80": gemm["ms"]["p80"],
                "samples": gemm["ms"]["count"],
                "calls": gemm["calls"],
                "gflop": work / 1e9,
                "tflops": work / ms / 1e9,
                "intensity": work / traffic,
                "bound_tflops": min(peak, work / traffic * bandwidth) / 1e12,
                "ceiling_percent": 100 * work / (ms / 1e3) / peak,
                "limit": operators.bound(work, traffic, ceilings)[1],
                "share_percent": 100 * ms * gemm["per_step"] / totals[gemm["batch_size"], gemm["sequence_length"]],
            }
        )
    return rows


def _by_grid_point(items: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """(batch size, sequence length) -> its items, in their order."""
    result = defaultdict(list)
    for item in items:
        result[item["batch_size"], item["sequence_length"]].append(item)
    return result


def _step_ms(gemms: list[dict[str, Any]]) -> float:
    return sum(gemm["ms"]["median"] * gemm["per_step"] for gemm in gemms)


def _conditions(measured: dict[str, Any]) -> str:
    ceilings, precision = measured["ceilings"], measured["precision"]
    tf32 = " (TF32 allowed)" if precision["tf32"] else ""
    return (
        f"{measured['device']['name']}, {precision['compute']}{tf32}, torch {measured['environment']['torch']}. "
        f"Measured ceilings: GEMM {ceilings['flops_per_second'] / 1e12:.3g} TFLOP/s, copy "
        f"{ceilings['bytes_per_second'] / 1e9:.3g} GB/s, {ceilings['operation_seconds'] * 1e6:.2g} us to issue an operation; "
        f"compute and memory bound meet at {ceilings['flops_per_second'] / ceilings['bytes_per_second']:.3g} FLOP/byte."
    )


def _shapes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each shape and layout that was timed."""
    return list({(row["batch"], row["m"], row["n"], row["k"], row["layout"]): row for row in rows}.values())


def _doubts(shapes: list[dict[str, Any]]) -> str:
    """How far the figures can be relied on."""
    beyond = sum(row["tflops"] > row["bound_tflops"] for row in shapes)
    unsteady = sum(row["p80"] > 1.5 * row["p20"] for row in shapes)
    return (
        f"Faster than their roofline bound: {beyond} of {len(shapes)} shapes. Repeated calls find operands in a cache, which the "
        "copy's bandwidth does not know, and the GEMM ceiling is the rate of one large square product, not a limit of nature. "
        f"80th percentile more than 1.5 times the 20th: {unsteady} of {len(shapes)} shapes. Many such shapes mean that something "
        "else was running: measure again on an idle machine, or on a busy CPU with OMP_NUM_THREADS=1."
    )


def _grid_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Per grid point: time of all products of a step, their rate, and the product that takes most of it."""
    header = ["B", "S", "GEMM ms/step", "GFLOP/step", "TFLOP/s", "% of GEMM ceiling", "largest", "its % of GEMM time"]
    body = []
    for (batch_size, length), items in _by_grid_point(rows).items():
        ms = sum(row["ms"] * row["per_step"] for row in items)
        gflop = sum(row["gflop"] * row["per_step"] for row in items)
        ideal = sum(row["ceiling_percent"] * row["ms"] * row["per_step"] for row in items)
        shares = _shares(items)
        largest = max(shares, key=shares.get)
        body.append([batch_size, length, ms, gflop, gflop / ms, ideal / ms, largest, shares[largest]])
    return header, body


def _shares(items: list[dict[str, Any]]) -> dict[str, float]:
    """Percent of the step's GEMM time per name, all phases together."""
    result: dict[str, float] = defaultdict(float)
    for row in items:
        result[row["gemm"]] += row["share_percent"]
    return dict(result)


def _fusion_table(measured: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    """Per number of tokens and fused product: ms per step apart and fused, and their ratio, in all and by phase."""
    header = ["tokens B S", "fused", "separate ms", "fused ms", "separate / fused", *PHASES]
    body = {}
    separate_by_point, fused_by_point = _by_grid_point(measured["gemms"]), _by_grid_point(measured["fused"])
    for (batch_size, length), fused in fused_by_point.items():
        for name, parts in FUSED.items():
            pairs = []
            for phase in PHASES:
                apart = [g for g in separate_by_point[batch_size, length] if g["gemm"] in parts and g["phase"] == phase]
                together = [g for g in fused if g["gemm"] == name and g["phase"] == phase]
                pairs.append((_step_ms(apart), _step_ms(together)))
            apart_ms, together_ms = (sum(times) for times in zip(*pairs, strict=True))
            ratios = [apart / together for apart, together in pairs]
            body[batch_size * length, name] = [batch_size * length, name, apart_ms, together_ms, apart_ms / together_ms, *ratios]
    return header, [body[key] for key in sorted(body)]


def report(measured: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The Markdown report."""
    names = list(dict.fromkeys(row["gemm"] for row in rows))
    points = _by_grid_point(rows)
    shares = [[batch_size, length, *(_shares(items)[name] for name in names)] for (batch_size, length), items in points.items()]
    samples, calls = [row["samples"] for row in rows], [row["calls"] for row in rows]
    shapes = _shapes(rows)
    parts = [
        "# Matrix products of a training step",
        _conditions(measured),
        f"Model: {tables.letters(measured['model'])}. Made by `{measured['command']}` on {measured['date']}.",
        "Each product was timed alone, in rounds over all of them. ms is the median, with the 20th and 80th percentile, of "
        f"{min(samples)} to {max(samples)} samples; a sample is the time per product over calls back to back, and a row has "
        f"{min(calls):,} to {max(calls):,} calls. Products of one shape and layout share one measurement: {len(shapes)} were "
        f"timed for {len(rows)} rows.",
        _doubts(shapes),
        "![Roofline, and share of GEMM time](gemm_analysis.png)",
        "## The step's products together",
        "Sums over all products of a step, forward and backward. Norms, softmax, activations, the optimizer and the gaps between "
        "operations are not in them.",
        tables.markdown(*_grid_table(rows)).strip(),
        "## Share of GEMM time, percent",
        "Forward and both gradients together.",
        tables.markdown(["B", "S", *names], shares).strip(),
        "## Separate against fused products",
        "qkv_proj is one product with N = (H + 2 K) Dh in place of three, gate_up_proj one with N = 2 F in place of two. Times "
        "in ms for all in a step; the last columns are the ratio by phase. A ratio above 1 says that the fused product is "
        "faster. Fusing also saves the additions of the separate input gradients, which are not timed here.",
        tables.markdown(*_fusion_table(measured)).strip(),
        "## Every product",
        "C [M, N] = A [M, K] @ B [K, N], `batch` times. Layout: N stored row by row, T stored transposed. Bound: the roofline at "
        "this intensity. Limit: the longest of the times for work at the GEMM ceiling (compute), bytes at the copy's bandwidth "
        "(memory) and issuing one operation (launch).",
    ]
    for (batch_size, length), items in points.items():
        table = tables.markdown(list(DETAILS), [[row[key] for key in DETAILS.values()] for row in items])
        parts += [f"### B = {batch_size}, S = {length}", table.strip()]
    return "\n\n".join(parts) + "\n"


def plot(measured: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Left the roofline with a point per product and phase, right the share of GEMM time over the grid."""
    from matplotlib.lines import Line2D

    figure = plots.new(14, 6.5)
    model, precision = measured["model"], measured["precision"]["compute"]
    figure.suptitle(
        f"GEMMs of a training step: D {model['hidden_size']}, L {model['num_layers']}, F {model['intermediate_size']}, "
        f"V {model['vocab_size']}, {precision}, {measured['device']['name']}"
    )
    left, right = figure.subplots(1, 2)
    _roofline(left, measured["ceilings"], rows)
    _share_bars(right, rows)
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=8, linestyle="none", label=label)
        for label, (_, colour, marker) in KINDS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    plots.save(figure, path)


def _roofline(axes: Any, ceilings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    roofline.draw_roof(axes, ceilings, [row["intensity"] for row in rows])
    for names, colour, marker in KINDS.values():
        for forward in (True, False):
            chosen = [row for row in rows if row["gemm"] in names and (row["phase"] == "forward") == forward]
            axes.scatter(
                [row["intensity"] for row in chosen], [row["tflops"] for row in chosen], marker=marker, s=42,
                facecolors=colour if forward else "none", edgecolors=colour, linewidths=1.2, zorder=3,
            )  # fmt: skip
    axes.set_title(f"Roofline (filled: forward, hollow: gradients)\n{roofline.describe(ceilings)}")


def _share_bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    points = _by_grid_point(rows)
    labels = [f"{batch_size} x {length}" for batch_size, length in points]
    bottoms = [0.0] * len(points)
    for names, colour, _ in KINDS.values():
        heights = [sum(row["share_percent"] for row in items if row["gemm"] in names) for items in points.values()]
        axes.bar(labels, heights, bottom=bottoms, color=colour, edgecolor="white")
        for i, height in enumerate(heights):
            if height >= 4:
                axes.text(i, bottoms[i] + height / 2, f"{height:.0f}", ha="center", va="center", fontsize=9)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(title="Share of GEMM time in a step", ylabel="percent", ylim=(0, 100))
    axes.set_xlabel("batch size x sequence length")
    axes.tick_params(axis="x", rotation=45)
