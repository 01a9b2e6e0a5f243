"""Damaged files: what is done to a valid JSON, CSV or SQLite file, in the order of a seed."""

import copy
import csv
import functools
import io
import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

MISSING = object()
LONG, DEEP = 100_000, 100_000  # characters of a name, levels of nested lists
DIGITS = "9" * 6_000
NUMBER = "a number of 6,000 digits"  # stands for DIGITS, which json.dumps refuses to write
# What takes the place of a value. JSON has no NaN and no Infinity, but Python's parser reads both.
VALUES = (
    "x", None, [], {}, -1, 0, True, MISSING, float("nan"), float("inf"), 1e300, 2**62, 10**400, NUMBER, "n" * LONG,
    "\x1b[31m\x00`<b>|$x^$\ud800\n\n=1",
)  # fmt: skip
CELLS = ("x", "", "-1", "0", "nan", "inf", "1e300", DIGITS, "n" * LONG, "\x1b[31m`<b>|$x^$\ufffd\n\n=1", "[]")

Damage = Callable[[Path], None]


def places(content: Any, place: tuple = ()) -> Iterator[tuple]:
    """The way to each value in the content; of a list only the first and the last element."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        if isinstance(content, dict) or key in (0, len(content) - 1):
            yield (*place, key)
            yield from places(value, (*place, key))


def replaced(content: Any, place: tuple, value: object) -> Any:
    """A copy of the content with another value in this place."""
    result = copy.deepcopy(content)
    *way, last = place
    parent = result
    for key in way:
        parent = parent[key]
    if value is MISSING:
        del parent[last]
    else:
        parent[last] = value
    return result


def shown(value: object) -> str:
    return "missing" if value is MISSING else ascii(value)[:20]


def of_json(path: Path) -> Iterator[tuple[str, Damage]]:
    """Every value of the file replaced by every one of VALUES; each damage with its name."""
    content = json.loads(path.read_text())

    def replace(place: tuple, value: object) -> Damage:
        def damage(target: Path) -> None:
            text = json.dumps(replaced(content, place, value))
            target.write_text(text.replace(f'"{NUMBER}"', DIGITS))

        return damage

    for place in places(content):
        for value in VALUES:
            yield f"{'.'.join(map(str, place))} = {shown(value)}", replace(place, value)


def of_csv(path: Path) -> Iterator[tuple[str, Damage]]:
    """Every cell of header, first and last row replaced by every one of CELLS, and every column left out."""
    rows = list(csv.reader(io.StringIO(path.read_text())))

    def write(changed: list[list[str]]) -> Damage:
        def damage(target: Path) -> None:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(changed)
            target.write_text(text.getvalue())

        return damage

    header = max(range(len(rows)), key=lambda i: len(rows[i]))  # messages can stand above it
    for column, name in enumerate(rows[header]):
        yield f"{name} missing", write([row[:column] + row[column + 1 :] for row in rows])
        for number in (header, header + 1, max(i for i, row in enumerate(rows) if len(row) == len(rows[header]))):
            for value in CELLS:
                changed = copy.deepcopy(rows)
                changed[number][column] = value
                yield f"{name} in row {number} = {shown(value)}", write(changed)


def of_database(path: Path) -> Iterator[tuple[str, Damage]]:
    """Every column of every table replaced, in all its rows, by text, NULL, -1, infinity, a blob or a long name."""
    with closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in database.execute(f"PRAGMA table_info('{table}')")]
    whole = path.read_bytes()

    def update(table: str, column: str, value: object) -> Damage:
        def damage(target: Path) -> None:
            target.write_bytes(whole)
            with closing(sqlite3.connect(target)) as database:
                database.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
                database.commit()

        return damage

    for table, column in columns:
        for value in ("x", None, -1, 1e300, float("inf"), b"\xff\x00", 2**62, "n" * LONG):
            yield f"{table}.{column} = {shown(value)}", update(table, column, value)


def of_bytes(path: Path, generator: random.Random) -> Iterator[tuple[str, Damage]]:
    """The whole file: cut off, empty, of another encoding, other content."""
    whole = path.read_bytes()
    nested = b'{"a": ' * (whole[:1] == b"{") + b"[" * DEEP + b"]" * DEEP + b", " + whole[1:]
    contents = {
        "empty": b"", "blank": b" \n", "a zero": b"\x00", "binary": bytes(range(256)) * 20,
        "UTF-16": whole.decode("latin-1").encode("utf-16"), "Latin-1": whole.replace(b"a", b"\xe4"),
        "a byte order mark": b"\xef\xbb\xbf" + whole, "gzip cut off": b"\x1f\x8b\x08\x00" + whole[:20],
        "nested lists": b"[" * DEEP, "nested objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested in the content": nested,
        "null": b"null", "a list": b"[]", "an object": b"{}", "a number": DIGITS.encode(), "text": b'"x"', "NaN": b"NaN",
    }  # fmt: skip
    contents |= {f"cut off at {size}": whole[:size] for size in generator.sample(range(1, len(whole)), 5)}
    for name, content in contents.items():
        yield name, functools.partial(_write, content)


def _write(content: bytes, target: Path) -> None:
    target.write_bytes(content)


def of(path: Path, generator: random.Random) -> tuple[list[tuple[str, Damage]], list[tuple[str, Damage]]]:
    """All damages to values in a valid file, and all damages to it as a whole; each with its name."""
    values = {".json": of_json, ".yaml": of_json, ".csv": of_csv, ".db": of_database}[path.suffix]
    return list(values(path)), list(of_bytes(path, generator))
