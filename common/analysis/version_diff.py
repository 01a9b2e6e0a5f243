"""What one version's forward pass changes in another's, as a diff for the documents."""

import ast
import difflib
from pathlib import Path


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
