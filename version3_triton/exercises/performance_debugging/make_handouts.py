"""Writes the stages as handouts: the same programs under neutral names, without reports, comments
and fixes.

    python make_handouts.py --output-dir handouts
    python handouts/stage_a.py --num-steps 20

The folder, which lies inside the clone, gets stage_a.py to stage_f.py, their kernels, and what all
stages share. A handout is generated from its stage: docstrings, comments, `caveat`, and the
branches of `options.fixed` are left out. It trains with the same numbers. INSTRUCTOR.md says which
stage each one is.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import ast
from typing import Any

from common import cli
from tracepage.files import writable_folder, write_text

HERE = Path(__file__).resolve().parent
STAGES = {"a": 2, "b": 6, "c": 1, "d": 5, "e": 4, "f": 3}  # the letter of each stage's handout
SHARED = ("stages.py", "diagnose.py")
DOCSTRING = '''"""Stage {upper}: Version 3, with one thing replaced or with nothing replaced.

    python stage_{letter}.py --num-steps 20
    python stage_{letter}.py --diagnose
"""
'''


class Neutral(ast.NodeTransformer):
    """Removes docstrings and what `options.fixed` would choose."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
        return super().generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> Any:
        self.generic_visit(node)
        chosen = {"options.fixed": node.orelse, "not options.fixed": node.body}
        return chosen.get(ast.unparse(node.test), node)

    visit_IfExp = visit_If

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) == "Stage":
            node.keywords = [
                keyword for keyword in node.keywords if keyword.arg not in ("caveat", "fixable")
            ]
            node.keywords.append(ast.keyword("fixable", ast.Constant(False)))
        return self.generic_visit(node)


def neutral(path: Path) -> Any:
    return Neutral().visit(ast.parse(path.read_text()))


def names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def handout(tree: ast.Module) -> str:
    """The definitions that a stage is made of, what they use, and the imports for them; without
    --fixed.
    """
    # Before it, the script finds `common`.
    start = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.Expr)) + 1
    head = tree.body[:start]
    body = tree.body[start:]
    definitions = {
        node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    script = [node for node in body if isinstance(node, ast.Assign | ast.If)]
    used = set().union(*map(names, script))
    for _ in definitions:  # The longest chain of uses has each once.
        for name in used & definitions.keys():
            used |= names(definitions[name])
    for node in imports:
        node.names = [
            alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in used
        ]
    kept = [node for name, node in definitions.items() if name in used]
    return ast.unparse(
        ast.Module(
            [*head, *(node for node in imports if node.names), *kept, *script], type_ignores=[]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="the folder for the handouts"
    )
    folder = writable_folder(cli.parse(parser).output_dir, "--output-dir")
    for name in SHARED:
        write_text(folder / name, (HERE / name).read_text())
    for path in HERE.glob("*_kernel.py"):
        write_text(folder / path.name, ast.unparse(neutral(path)) + "\n")
    for letter, number in STAGES.items():
        [path] = HERE.glob(f"v3_stage{number}_*.py")
        docstring = DOCSTRING.format(letter=letter, upper=letter.upper())
        write_text(folder / f"stage_{letter}.py", f"{docstring}\n{handout(neutral(path))}\n")
    print(f"wrote {', '.join(f'stage_{letter}.py' for letter in STAGES)} into {folder}")


if __name__ == "__main__":
    cli.command(main)
