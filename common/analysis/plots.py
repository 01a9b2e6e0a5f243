"""Figures as PNG files, drawn without a display and without pyplot's global state."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that people with any colour vision tell apart (Okabe and Ito 2008, "Color Universal Design").
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"


def new(width: float, height: float) -> "Figure":
    """An empty figure of width x height inches that arranges its axes so that no label is cut off."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Draws the PNG with Agg under a temporary name and renames it, so that `path` never holds half a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        FigureCanvasAgg(figure).print_figure(temporary, format="png", dpi=140)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
