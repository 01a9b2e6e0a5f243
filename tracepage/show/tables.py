"""Tables as terminal text, Markdown and CSV, and numbers and times as a person reads them."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tracepage import terminal
from tracepage.terminal import counted, format_number, format_time, shortened, time_unit  # noqa: F401

if TYPE_CHECKING:
    import pandas

NAME = 40  # characters to which a text column is shortened where a table is wider than the terminal
LETTERS = {
    "D": "hidden_size",
    "L": "num_layers",
    "H": "num_attention_heads",
    "K": "num_key_value_heads",
    "F": "intermediate_size",
    "V": "vocab_size",
}

Rows = Iterable[Sequence[object]]
Table = tuple[list[str], list[list[Any]]]  # header and rows; a cell is a number, text or None


def format_rate(flops_per_second: float) -> str:
    """ "77.9 GFLOP/s", "1.23 TFLOP/s"."""
    if flops_per_second >= 1e12:
        return f"{format_number(1e-12 * flops_per_second)} TFLOP/s"
    return f"{format_number(1e-9 * flops_per_second)} GFLOP/s"


def spread(times: Mapping[str, Any]) -> str:
    """The range of step times from `p20` to `p80`, such as "9.41 to 9.87"."""
    return f"{format_number(times['p20'])} to {format_number(times['p80'])}"


def numeric(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """Which columns hold only numbers (or None); these are aligned to the right."""
    right = [bool(rows)] * len(header)
    for row in rows:
        for i, cell in enumerate(row):
            right[i] = right[i] and isinstance(cell, int | float | None)
    return right


def one_line(value: object) -> str:
    return format_number(value).replace("\n", " ")


def markdown_text(text: str) -> str:
    """The text with `<` escaped outside of code between backticks on one line, so that no text is
    taken for markup.
    """
    return re.sub(r"(`[^`\n]*`)|<", lambda match: match[1] or "&lt;", text)


def markdown(header: Sequence[str], rows: Rows, code: Sequence[str] = ()) -> str:
    """A Markdown table; text in the columns named in `code` is set as code."""
    rows = [list(row) for row in rows]

    def cell(value: object, name: str) -> str:
        text = one_line(value)
        if name in code and text and isinstance(value, str):
            text = f"`{text}`"
        return markdown_text(text).replace("|", "\\|")

    lines = [
        [cell(name, "") for name in header],
        ["---:" if right else "---" for right in numeric(header, rows)],
    ]
    for row in rows:
        lines.append([cell(value, name) for value, name in zip(row, header, strict=True)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def text(header: Sequence[str], rows: Rows, least: Sequence[str] = (), elsewhere: str = "") -> str:
    """A table for a terminal, no wider than it is.

    Text that is too long is shortened. If that is not enough, columns are left out: those of
    `least` in this order, then others from the right, but the last. A line below names them, and
    `elsewhere`, the file that holds all columns.
    """
    header = list(header)
    rows = [list(row) for row in rows]
    right = numeric(header, rows)
    cells = [list(map(one_line, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    kept = list(range(len(header)))

    def too_wide() -> bool:
        return sum(widths[i] + 2 for i in kept) - 2 > terminal.width()

    if too_wide():
        for i in kept:
            if not right[i]:
                widths[i] = min(widths[i], NAME)
    for i in dict.fromkeys([*map(header.index, least), *range(len(header) - 2, 0, -1)]):
        if too_wide():
            kept.remove(i)
    lines = []
    for row in cells:
        line = ""
        for i in kept:
            cell = shortened(row[i], widths[i])
            line += (cell.rjust(widths[i]) if right[i] else cell.ljust(widths[i])) + "  "
        lines.append(line.rstrip())
    left_out = [name for i, name in enumerate(header) if i not in kept]
    if left_out:
        where = f" ({elsewhere} has all)" if elsewhere else ""
        lines.append(shortened(f"columns left out: {', '.join(left_out)}{where}", terminal.width()))
    return "\n".join(lines)


def csv_text(header: Sequence[str], rows: Rows) -> str:
    """CSV with numbers in full and None as an empty cell."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([header, *rows])
    return lines.getvalue()


def filled(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """The table without the columns that are empty in every row."""
    columns = zip(header, *rows, strict=True)
    kept = [column for column in columns if {*column[1:]} - {None, ""}]
    lines = [list(line) for line in zip(*kept, strict=True)] or [[]]
    return lines[0], lines[1:]


def of_frame(frame: "pandas.DataFrame") -> Table:
    return frame.columns.tolist(), frame.astype(object).to_numpy().tolist()


def letters(model: Mapping[str, object]) -> str:
    """A model's sizes (`model` of a run record) under their letters: "D 256, L 4, ..."."""
    return ", ".join(f"{letter} {model[name]}" for letter, name in LETTERS.items())
