"""SQLite files of profilers, which are opened read-only."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError

SQLITE = b"SQLite format 3\0"  # A database begins with it.


def query(path: Path, sql: str) -> list[tuple]:
    """The rows of an answer. UsageError: the file is no database, or is damaged."""
    try:
        with (
            files.opened(path),
            closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database,
        ):
            return database.execute(sql).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"{path} is not a SQLite database, or is damaged: {error}") from error


def tables(path: Path) -> set[str]:
    """The names of its tables and views."""
    return {name for (name,) in query(path, "SELECT name FROM sqlite_master")}


def columns(path: Path, table: str) -> set[str]:
    """The names of a table's columns; none where there is no such table."""
    return {name for _, name, *_ in query(path, f"PRAGMA table_info({table})")}
