"""Tables of what there is to run, and of what there is to solve.

A command is a Python script with `if __name__ == "__main__"`, a shell script that begins with `#!`, a target of the Makefile with
a comment `## ...`, or a module of common whose docstring says that `python -m` runs it.
"""

import ast
import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from common.analysis.output import tables

ROOT = Path(__file__).parents[2]
FOLDERS = ("results", "slurm", "version*_*")  # that have scripts, beside the root itself
SHELLS = {".sh": "bash", ".sbatch": "sbatch"}
TARGET = re.compile(r"^([a-z-]+):.*?## (.*)$", re.MULTILINE)


class Command(NamedTuple):
    folder: Path
    line: str
    purpose: str


def first_sentence(text: str) -> str:
    """Of the first paragraph, up to a full stop, question mark or exclamation mark with a space after it."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.sub(":$", ".", re.split(r"(?<=[.?!]) ", paragraph)[0])


def _is_script(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body)


def _python(path: Path) -> Command | None:
    """Of a file that `python FILE` or `python -m MODULE` runs; a module of common counts if its docstring says so."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "common":
        line = f"python -m {'.'.join(part for part in parts if part != '__main__')}"
        found = parts[-1] == "__main__" or (_is_script(tree) and re.search(rf"{re.escape(line)}\b", text))
        return Command(ROOT, line, first_sentence(text)) if found else None
    return Command(path.parent, f"python {path.name}", first_sentence(text)) if _is_script(tree) else None


def _shell(path: Path) -> Command | None:
    """Of a file that begins with `#!`; its purpose is the comment below that line. A file that others source has no such line."""
    found = re.match(r"#!.*\n((?:#.*\n)+)", path.read_text(encoding="utf-8"))
    return found and Command(
        path.parent, f"{SHELLS[path.suffix]} {path.name}", first_sentence(re.sub("^# ?", "", found[1], flags=re.MULTILINE))
    )


def scripts() -> list[Path]:
    """The Python and shell files that may be commands, by folder; no links to folders are followed."""
    folders = [folder for pattern in ("common", *FOLDERS) for folder in sorted(ROOT.glob(pattern))]
    found = [ROOT / "setup.sh", *(path for folder in folders for path in sorted(folder.rglob("*")))]
    return [path for path in found if path.suffix in (".py", *SHELLS)]


def all_commands() -> list[Command]:
    """The targets of the Makefile, the commands of the root, then those of each folder."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [Command(ROOT, f"make {name}", f"{purpose[0].upper()}{purpose[1:]}.") for name, purpose in TARGET.findall(makefile)]
    found = [_python(path) if path.suffix == ".py" else _shell(path) for path in scripts()]
    return sorted(filter(None, targets + found), key=lambda command: command.folder)


def commands() -> str:
    """A table for each folder: a row per command, with the first sentence of its docstring or its opening comment."""
    parts = []
    for folder, group in groupby(all_commands(), lambda command: command.folder):
        place = folder.relative_to(ROOT).as_posix()
        name = "In the root of the repository" if folder == ROOT else f"In `{place}/`"
        parts.append(
            f"{name}:\n\n{tables.markdown(['command', 'purpose'], [command[1:] for command in group], code=['command'])}"
        )
    return "\n".join(parts)
