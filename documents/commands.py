"""The list of all commands and what each is for.

A command is a Python script with `if __name__ == "__main__"`, a shell script that begins with `#!`,
or a target of the Makefile with a comment `## ...`; these call what is a command in the library.
"""

import re
from itertools import groupby
from pathlib import Path

from common import ROOT

# those of exercises are on their pages
PATTERNS = ("*.*", "results/*.sh", "slurm/*.sbatch", "version*_*/*.*", "decoding/*.py")
# in a file that is a command
START = {".py": '\nif __name__ == "__main__":', ".sh": "#!", ".sbatch": "#!"}
RUN = {".py": "python", ".sh": "bash", ".sbatch": "sbatch"}


def scripts() -> list[Path]:
    """The commands in files, folder by folder."""
    found = [
        path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern)) if path.suffix in START
    ]
    return [
        path
        for path in found
        if path.parent.name != "common" and START[path.suffix] in path.read_text()
    ]


def purpose(script: Path) -> str:
    """The first sentence of its docstring, or of the comment at its top."""
    text = script.read_text(encoding="utf-8")
    top = (
        text.partition('"""')[2].partition('"""')[0]
        if script.suffix == ".py"
        else re.sub("^#!.*\n|^# ?", "", text, flags=re.M)
    )
    return re.sub(
        ":$", ".", re.split(r"(?<=[.?!]) ", " ".join(top.partition("\n\n")[0].split()))[0]
    )


def commands() -> str:
    """A list for each folder: a command and its purpose. A command that a version before has too
    stands there alone.
    """
    targets = re.findall(
        r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    lines = [
        "In the root of the repository:",
        "",
        *(f"- `make {name}`: {text}" for name, text in targets),
    ]
    listed: set[str] = set()
    for folder, group in groupby(scripts(), lambda script: script.parent):
        if folder != ROOT:
            lines += ["", f"In `{folder.relative_to(ROOT).as_posix()}/`:", ""]
        for script in group:
            if script.name in listed:
                continue
            listed.add(script.name)
            lines.append(f"- `{RUN[script.suffix]} {script.name}`: {purpose(script)}")
    return "\n".join(lines) + "\n"
