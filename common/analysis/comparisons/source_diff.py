"""What differs between two Python files with the same definitions: which are the same, and how many lines of the rest changed.

A definition is a function, a method, or a class without its methods; what is left (docstring, imports, constants) counts as one
more, the module level. Two are the same if their lines are, blank ones apart. Added and removed lines are those that difflib
finds within one definition, so that moving one costs nothing.

What one version's forward pass changes in another's, as a diff for the documents.
"""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UsageError

MODULE_LEVEL = "(module level)"


class Change(NamedTuple):
    """A definition, whether it is `same`, `changed`, `new` or `gone`, its lines in each file, and those added and removed."""

    name: str
    kind: str
    before: int
    after: int
    added: int
    removed: int


def definitions(script: Path) -> dict[str, list[str]]:
    """The lines of each definition, blank ones left out, by name (methods: Class.method) in order of their appearance.

    Raises:
        UsageError: the script is not valid Python.
    """
    source = script.read_text(encoding="utf-8")
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
    """A row per definition of two scripts, in the order of the second; those that are only in the first come last."""
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


def _methods(path: Path) -> dict[str, list[str]]:
    """The source lines of what runs in a forward pass, by class and method."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    return {
        f"{part.name}.{method.name}": [line[4:] for line in lines[method.lineno - 1 : method.end_lineno]]
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef)
        for method in part.body
        if isinstance(method, ast.FunctionDef) and method.name in ("forward", "hidden_states", "loss")
    }


def forward_diff(before: Path, after: Path) -> str:
    """Markdown: for each method that both have and that differs, its diff with one line around each change."""
    old, new = _methods(before), _methods(after)
    shown = []
    for name in (name for name in old if name in new):
        diff = difflib.unified_diff(old[name], new[name], n=1, lineterm="")
        changes = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
        shown += ["\n".join([f"  # {name}", *changes])] if changes else []
    return "```diff\n" + "\n\n".join(shown) + "\n```\n"


TABLES = {"forward_diff": forward_diff}
