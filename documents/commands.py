"""The list of all commands and what each is for.

A command is a Python script with `if __name__ == "__main__"`, a shell script that begins with `#!`,
or a target of the Makefile with a comment `## ...`; these call what is a command in the library.
"""

import re
from itertools import groupby
from pathlib import Path

from common import ROOT

# Commands of exercises are on their pages.
PATTERNS = ("*.*", "results/*.sh", "slurm/*.sbatch", "version*_*/*.*", "decoding/*.py")
START = {".py": '\nif __name__ == "__main__":', ".sh": "#!", ".sbatch": "#!"}  # of a command's file
RUN = {".py": "python", ".sh": "bash", ".sbatch": "sbatch"}


def scripts() -> list[Path]:
    """The commands in files, folder by folder."""
    commands = []
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in START and START[path.suffix] in path.read_text():
                commands.append(path)
    return commands


def purpose(script: Path) -> str:
    """The first sentence of its docstring, or of the comment at its top."""
    text = script.read_text(encoding="utf-8")
    if script.suffix == ".py":
        text = text.split('"""')[1]
    else:
        text = re.sub("^#!.*\n|^# ?", "", text, flags=re.M)
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.sub(":$", ".", re.split(r"(?<=[.?!]) ", paragraph)[0])


def commands() -> str:
    """A list for each folder: a command and its purpose. A command that a version before has too
    stands there alone.
    """
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = ["In the root of the repository:", ""]
    for name, text in re.findall(r"^([a-z-]+):.*?## (.*)$", makefile, re.MULTILINE):
        lines.append(f"- `make {name}`: {text}")
    listed = set()
    for folder, group in groupby(scripts(), lambda script: script.parent):
        if folder != ROOT:
            lines += ["", f"In `{folder.relative_to(ROOT).as_posix()}/`:", ""]
        for script in group:
            if script.name not in listed:
                listed.add(script.name)
                lines.append(f"- `{RUN[script.suffix]} {script.name}`: {purpose(script)}")
    return "\n".join(lines) + "\n"
