"""Tables and a picture of Version 4's comparisons: of the block in one kernel, and of several GPUs."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from common.analysis.output import plots
from common.documents.pictures import Picture
from common.documents.result_tables import find, table
from common.errors import UsageError
from common.files import read
from common.records import run_record, scaling_file
from common.records.kernel_files import BlockFusion
from common.studies.scaling import scaling_results

import pandas

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def block_fusion(path: Path) -> str:
    """A row for each batch size: the time of a block as one kernel and in layers, in microseconds."""
    measured = read(path, BlockFusion)
    programs = measured["device"]["multiprocessors"]
    rows = []
    for row in measured["rows"]:
        single, layered = 1e3 * row["single_ms"]["median"], 1e3 * row["layered_ms"]["median"]
        rows.append([row["batch_size"], row["batch_size"] / programs, single, layered, layered / single])
    header = ["B", "programs of the single kernel / multiprocessors", "one kernel, us", "in layers, us", "layers / one kernel"]
    return table(header, rows, measured)


def clocks(folder: Path) -> str:
    """A row for each GPU of each sampled job: step time at the beginning, at the end and in all, and clock and power in training.

    Reads what `sample_gpu.py` wrote while a job trained, JOB.csv, and its record: JOB.json, or JOB_GPU.json of runs side by side.
    Samples of training are those with over nine tenths of the GPU's highest power.
    """
    rows, records = [], []
    for path in sorted(folder.glob("*.csv")):
        for gpu, samples in pandas.read_csv(path).groupby("gpu"):
            own = path.with_name(f"{path.stem}_{gpu}.json")
            record = run_record.read_timed(own if own.exists() else path.with_suffix(".json"))
            steps = record["step_ms"]["all"]
            clock, power = samples[samples.power_w > 0.9 * samples.power_w.max()][["clock_mhz", "power_w"]].median()
            rows.append([path.stem, gpu, median(steps[:12]), median(steps[-100:]), median(steps), clock, power])
            records.append(record)
    if not rows:
        raise UsageError(f"no .csv file in {folder}: sample a job with sample_gpu.py --output JOB.csv")
    header = ["job", "GPU", "first 12 steps, ms", "last 100, ms", "all, ms", "clock, MHz", "power, W"]
    return table(header, rows, *records)


def scaling_efficiency(folder: Path) -> Picture:
    """Efficiency in weak scaling over GPUs, a panel for each preset, from scaling_<preset>_<precision>.json."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for preset, precision, path in find(folder, "scaling_{preset}_{precision}.json", "measure_scaling.sh"):
        study = scaling_file.read(path)
        panel = panels.setdefault(f"{preset}, {precision}", {})
        for row in scaling_results.results(study):
            if row["scaling"] == "weak" and row["parallel"] and row["efficiency"]:
                line = panel.setdefault(f"{row['model']}, {row['parallel']}", {1: 100.0})
                line[row["processes"]] = round(100 * row["efficiency"], 1)
    device = study["device"]["name"] if study["device"] else ""
    least = min(value for panel in panels.values() for points in panel.values() for value in points.values())
    said = [
        f"{title}: " + "; ".join(f"{name} {points[max(points)]:.0f}% on {max(points)}" for name, points in panel.items())
        for title, panel in panels.items()
    ]
    description = f"Efficiency of training on several {device}, each with the same batch as one. {'. '.join(said)}"

    def draw() -> "Figure":
        figure = plots.new(1.5 + 4.5 * len(panels), 3.4)
        figure.suptitle(f"Throughput over that of as many single GPUs, {device}", fontsize=11)
        for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            for number, (name, points) in enumerate(panel.items()):
                axes.plot(*zip(*sorted(points.items()), strict=True), label=name, **plots.style(number))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(title=title, xlabel="GPUs", ylabel="efficiency, %", ylim=(10 * (least // 10) - 10, 105))
            axes.spines[["top", "right"]].set_visible(False)
        handles = axes.get_legend_handles_labels()
        figure.legend(*handles, loc="outside right center", fontsize=8)
        return figure

    return Picture(f"scaling-efficiency-{folder.name}", panels, description, draw)
