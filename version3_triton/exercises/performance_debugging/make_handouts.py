"""Writes the stages as handouts: the same programs under neutral names, without reports, comments
and fixes.

    python make_handouts.py --output-dir handouts
    python handouts/stage_a.py --num-steps 20

The folder, which lies inside the clone, gets stage_a.py to stage_f.py, their kernels, and what all
stages share. A handout is generated from its stage: docstrings and comments are left out, and what
stands below END, the fix. It trains with the same numbers. INSTRUCTOR.md says which stage each one
is.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import ast

from common import cli
from tracepage.files import writable_folder, write_text

HERE = Path(__file__).resolve().parent
STAGES = {"a": 2, "b": 6, "c": 1, "d": 5, "e": 4, "f": 3}  # the letter of each stage's handout
SHARED = ("stages.py", "diagnose.py")
END = "# A handout ends here."  # a line of each stage's file
ROOT = "Path(__file__).resolve().parents[3]"  # in a stage's file; a handout stands elsewhere
SEARCH = "next((p for p in Path(__file__).resolve().parents if (p / 'common').is_dir()))"
MAIN = 'if __name__ == "__main__":\n    STAGE.main()\n'
DOCSTRING = '''"""Stage {upper}: Version 3, with one thing replaced or with nothing replaced.

    python stage_{letter}.py --num-steps 20
    python stage_{letter}.py --diagnose
"""
'''


def undocumented(text: str) -> str:
    """A program without docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return f"{ast.unparse(tree)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="the folder for the handouts"
    )
    folder = writable_folder(cli.parse(parser).output_dir, "--output-dir")
    for name in SHARED:
        write_text(folder / name, (HERE / name).read_text())
    for path in HERE.glob("*_kernel.py"):
        write_text(folder / path.name, undocumented(path.read_text()))
    for letter, number in STAGES.items():
        [path] = HERE.glob(f"v3_stage{number}_*.py")
        docstring = DOCSTRING.format(letter=letter, upper=letter.upper())
        program = undocumented(path.read_text().partition(END)[0]).replace(ROOT, SEARCH)
        write_text(folder / f"stage_{letter}.py", f"{docstring}\n{program}{MAIN}")
    print(f"wrote {', '.join(f'stage_{letter}.py' for letter in STAGES)} into {folder}")


if __name__ == "__main__":
    cli.command(main)
