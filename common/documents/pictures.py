"""Pictures in the documents: SVG files in pictures/, drawn from the files in results/ that their marker names.

Versions of matplotlib draw the same figure with different bytes. So a picture holds a digest of the numbers that it shows, and is
out of date when these numbers have changed.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.output import plots, tables
from common.documents.measured import find
from common.studies import benchmark

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """What a picture shows, the same in words for those who cannot see it, and how it is drawn."""

    name: str
    numbers: Any  # as JSON holds them
    description: str
    draw: Callable[[], "Figure"]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.numbers).encode()).hexdigest()[:16]

    def drawn(self) -> str:
        """The content of the SVG file."""
        drawing = plots.svg(self.draw(), self.name, self.description)
        return drawing.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" data-digest="{self.digest()}" ', 1) + "\n"

    def is_current(self, path: Path) -> bool:
        return path.is_file() and f'data-digest="{self.digest()}"' in path.read_text(encoding="utf-8")[:2000]


def ladder(folder: Path) -> Picture:
    """The step time of every version and peer in bf16, a panel for each preset, from peers_<preset>_bf16.json."""
    panels = {}
    for preset, precision, path in find(folder, "peers_{preset}_{precision}.json"):
        if precision == "bf16":
            study = benchmark.read(path)
            times = {c["model"]: [run["step_ms"]["median"] for run in c["runs"]] for c in study["cells"] if c["status"] == "ok"}
            panels[f"{preset}, {study['batch_sizes'][0]} x {study['sequence_lengths'][0]} tokens"] = {
                model: median(runs) for model, runs in times.items()
            }
    best = [f"{title.split(',')[0]} {tables.format_number(min(times.values()))} ms" for title, times in panels.items()]
    device = study["device"]["name"]
    description = f"Step time of all versions and peers on one {device} in bf16; the fastest of each preset: {', '.join(best)}"

    def draw() -> "Figure":
        figure = plots.new(11, 1.0 + 0.3 * max(map(len, panels.values())) * -(-len(panels) // 2))
        figure.suptitle(f"One training step, ms (logarithmic), bf16, one {device}", fontsize=11)
        grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
        for axes, (title, times) in zip(grid, panels.items(), strict=False):
            names = sorted(times, key=times.get, reverse=True)
            colours = [colour(name) for name in names]
            bars = axes.barh(names, [times[name] for name in names], color=colours)
            axes.bar_label(bars, [tables.format_number(times[name]) for name in names], padding=3, fontsize=8)
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlim(min(times.values()) / 2, 2.2 * max(times.values()))
            axes.set_title(title, fontsize=10)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    return Picture(f"ladder-{folder.name}", panels, description, draw)


def colour(model: str) -> str:
    """One colour for each version, with and without torch.compile, and grey for the peers."""
    version = re.fullmatch(r"v(\d+)(-.*)?", model)
    return (plots.ORANGE, plots.SKY, plots.BLUE, plots.GREEN)[int(version[1]) - 1] if version else "0.7"
