"""Tables as text, Markdown and CSV, from rows; figures in a form that fits their size."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence


def figure(value: object) -> str:
    """A number with three significant digits or as a whole, thousands apart; text as it is; None as an empty cell."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns whose cells are all numbers are aligned to the right."""
    rows = [list(row) for row in rows]
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
    lines = [list(header), ["---:" if right else "---" for right in numeric]]
    lines += [[figure(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same for a terminal: columns padded, nothing cut off."""
    rows = [list(row) for row in rows]
    cells = [list(header)] + [[figure(cell) for cell in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    )


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same as CSV: figures in full, None as an empty cell."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([header, *rows])
    return lines.getvalue()


def filled(header: Sequence[str], rows: Sequence[Sequence[object]]) -> tuple[list[str], list[list[object]]]:
    """Without the columns that hold None in every row."""
    kept = [i for i in range(len(header)) if any(row[i] is not None for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def letters(model: Mapping[str, object]) -> str:
    """A model's sizes (`model` of a run record) under their letters: "D 256, L 4, ..."."""
    names = {
        "D": "hidden_size", "L": "num_layers", "H": "num_attention_heads", "K": "num_key_value_heads", "F": "intermediate_size",
        "V": "vocab_size",
    }  # fmt: skip
    return ", ".join(f"{letter} {model[name]}" for letter, name in names.items())
