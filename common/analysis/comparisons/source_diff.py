"""Compares two Python files definition by definition.

A definition is a function, a method, or a class without its methods; the rest (docstring, imports, constants) counts as one more,
the module level. Two definitions are the same if their lines are, blank ones apart. Added and removed lines are those within one
definition, by difflib, so that a definition that has only moved is the same.
"""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UsageError
from common.files import opened

MODULE_LEVEL = "(module level)"


class Change(NamedTuple):
    """A definition; `kind` is same, changed, new or gone. Its lines are counted in each file, and those added and removed."""

    name: str
    kind: str
    before: int
    after: int
    added: int
    removed: int


def definitions(script: Path) -> dict[str, list[str]]:
    """The lines of each definition, blank ones left out, by name (methods: Class.method) in order of their appearance."""
    with opened(script) as file:
        source = file.read().decode("utf-8")
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{script} is not valid Python: {error.msg} at line {error.lineno}") from error
    lines = source.splitlines()
    owners = [MODULE_LEVEL] * len(lines)
    for name, node in _walk(module):
        first = min(part.lineno for part in (node, *node.decorator_list)) - 1
        owners[first : node.end_lineno] = [name] * (node.end_lineno - first)
    found: dict[str, list[str]] = {}
    for owner, line in zip(owners, lines, strict=True):
        if line.strip():
            found.setdefault(owner, []).append(line)
    return found


def _walk(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Functions and classes with their full names; a class before what is in it."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.")


def compare(before: Path, after: Path) -> list[Change]:
    """A Change per definition of two scripts, in the order of the second; those that are only in the first come last."""
    old, new = definitions(before), definitions(after)
    changes = []
    for name in dict.fromkeys([*new, *old]):
        ours, theirs = old.get(name, []), new.get(name, [])
        edits = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
        removed = sum(stop - start for kind, start, stop, _, _ in edits if kind != "equal")
        added = sum(stop - start for kind, _, _, start, stop in edits if kind != "equal")
        if ours and theirs:
            kind = "changed" if added or removed else "same"
        elif theirs:
            twin = next((other for other, lines in old.items() if len(lines) > 1 and lines[1:] == theirs[1:]), None)
            kind = "new" + (f", with the body of the old {twin}" if twin else "")
        else:
            kind = "gone"
        changes.append(Change(name, kind, len(ours), len(theirs), added, removed))
    return changes
