"""The names that the workshop's description fixes still exist. description.tsv has them.

A row of it is a kind, a place and the names there, divided by "; ":

    file        files of a folder
    flag        flags that the `--help` of a script shows
    function    functions and classes that a file has when it is imported
    text        words of a file: outputs that a test expects or a help names, lines that a script prints, commands of a page
"""

import csv
import re
import runpy
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.pages import help_of

import pytest

pytest.importorskip("triton", reason="needs Triton")

TABLE = Path(__file__).with_name("description.tsv").read_text(encoding="utf-8")
ROWS = list(csv.DictReader(TABLE.splitlines(), dialect="excel-tab", quoting=csv.QUOTE_NONE))


def missing(kind: str, place: Path, names: list[str]) -> list[str]:
    """Those of the names that are not there."""
    if kind == "file":
        return [name for name in names if not (place / name).is_file()]
    if kind == "text":
        text = place.read_text(encoding="utf-8")
        return [name for name in names if name not in text]
    known = {
        "flag": lambda: re.findall(r"--[\w-]+", help_of(place)),
        "function": lambda: runpy.run_path(str(place)),
    }
    return sorted(set(names) - set(known[kind]()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['kind']} {row['where']}")
def test_the_names_of_the_description_exist(row, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add to it
    absent = missing(row["kind"], ROOT / row["where"], row["names"].split("; "))
    assert not absent, f"{row['where']} has no {', '.join(absent)}, which the description names"
