"""The report on a gemm_analysis.json: every matrix product of a training step against its roofline.

A product does 2 batch M N K FLOPs and moves at least batch (M K + K N + M N) numbers. Its limit is
the longest of three times: the FLOPs at the measured peak (compute), the bytes at the measured
bandwidth (memory), and the time to issue one operation (launch).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracepage import files
from tracepage.show import plots, run_facts, tables
from tracepage.show.report import Report
from tracepage.views import roofline

import pandas

SCHEMA = "tiny-llama-gemms/1"
POINT = ["batch_size", "sequence_length"]  # of the grid
SHAPE = ["batch", "m", "n", "k", "layout"]
SHOWN = ["gemm", "phase", "m", "n", "k", "ms", "tflops", "intensity", "ceiling_percent", "limit"]


def render_gemms(path: Path) -> Report:
    """The products of the last point in a table and all in a CSV and in a picture."""
    measured = files.read_json(path, SCHEMA)
    rows = describe(measured)
    ceilings = measured["ceilings"]
    conditions = run_facts.describe({**measured, "training": {}}, *POINT)
    shapes = rows.drop_duplicates(SHAPE)
    noisy = (100 * (shapes["p80"] - shapes["p20"]) / shapes["ms"] > run_facts.NOISY).sum()
    report = Report("Matrix products of a training step")
    report.text(
        f"{conditions}; {roofline.describe(ceilings)}. Issuing one operation takes "
        f"{tables.format_time(1e3 * ceilings['operation_seconds'])}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
        "Each product was timed alone, in rounds over all of them. Times are medians. Products of "
        "one shape and layout share one measurement. Repeated calls find operands in a cache, so a "
        "small product can be faster than its roofline bound.",
        f"Noisy, since p20 to p80 spans more than {run_facts.NOISY} % of the median: {noisy} of "
        f"{len(shapes)} shapes.",
    )
    report.figure(
        lambda: draw_roofline(measured, rows, conditions),
        "gemm_analysis",
        "Roofline of all products",
    )
    last = rows[(rows[POINT] == rows[POINT].iloc[-1]).all(axis=1)]
    size = " x ".join(map(str, last[POINT].iloc[0]))
    title = f"Products at B x S = {size}; the CSV file has all"
    report.table(*tables.of_frame(last[SHOWN]), title)
    report.csv("gemm_analysis", *tables.of_frame(rows))
    report.json("gemm_analysis", measured)
    return report


def describe(measured: Mapping[str, Any]) -> pandas.DataFrame:
    """A row of the CSV for each product of the step at each point of the grid; `intensity` is in
    FLOP/byte.
    """
    ceilings = measured["ceilings"]
    rows = pandas.DataFrame(
        [{**timing, **timing["ms"], "ms": timing["ms"]["median"]} for timing in measured["gemms"]]
    )
    rows = rows[[*POINT, "gemm", "phase", *SHAPE, "per_step", "ms", "p20", "p80"]]
    batch, m, n, k = (rows[name].astype(float) for name in ("batch", "m", "n", "k"))
    flops = 2 * batch * m * n * k
    moved = measured["element_bytes"] * batch * (m * k + k * n + m * n)
    seconds = pandas.DataFrame(
        {
            "compute": flops / ceilings["flops_per_second"],
            "memory": moved / ceilings["bytes_per_second"],
            "launch": ceilings["operation_seconds"],
        }
    )
    return rows.assign(
        gflop=flops / 1e9,
        tflops=flops / rows["ms"] / 1e9,
        intensity=flops / moved,
        ceiling_percent=1e5 * seconds["compute"] / rows["ms"],
        limit=seconds.idxmax(axis=1),
    )


def draw_roofline(
    measured: Mapping[str, Any], rows: pandas.DataFrame, title: str
) -> "plots.Figure":
    """The roofline with a point for each product and phase."""
    figure = plots.new(8, 6)
    figure.suptitle(f"Matrix products of a training step: {title}", wrap=True)
    axes = figure.subplots()
    roofline.draw_roof(axes, measured["ceilings"], rows["intensity"])
    axes.set_title(roofline.describe(measured["ceilings"]), fontsize=10)
    for number, (name, points) in enumerate(rows.groupby("gemm", sort=False)):
        colour, marker = plots.style(number).values()
        axes.scatter(points["intensity"], points["tflops"], c=colour, marker=marker, label=name)
    figure.legend(loc="outside lower center", ncols=5)
    return figure
