"""The ways to do one operation of Version 4, each timed alone."""

from collections.abc import Collection
from pathlib import Path

from common.config import PRESETS
from documents import rows
from tracepage import files
from tracepage.show import tables


def epilogues(path: Path) -> str:
    """Products with an epilogue of ours, and a library's with a kernel after them."""
    return _ways(path, ("swiglu", "norm after gate and up"))


def others(path: Path) -> str:
    return _ways(path, ("rope", "attention", "norm_backward"))


def _ways(path: Path, levers: Collection[str]) -> str:
    """Microseconds at each preset, a row for each way."""
    record = files.read_json(path)
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in record["rows"]:
        if row["lever"] in levers:
            by_preset = times.setdefault((row["lever"], row["way"]), {})
            by_preset[row["preset"]] = row["us"]["median"]
    cells = [[*names, *map(by_preset.get, PRESETS)] for names, by_preset in times.items()]
    header = ["lever", "way", *(f"{preset}, us" for preset in PRESETS)]
    return f"{rows.conditions([record])}\n\n{tables.markdown(header, cells)}"
