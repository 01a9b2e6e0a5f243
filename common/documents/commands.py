"""The list of all commands: what each is for, and which flags it takes by its `--help`.

A command is a Python script with `if __name__ == "__main__"`, a shell script that begins with `#!`, or a target of the Makefile
with a comment `## ...`; these call what is a command in the library.
"""

import contextlib
import functools
import io
import re
import runpy
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from unittest import mock

from common import ROOT
from common.errors import UsageError

PATTERNS = ("*.*", "results/*.sh", "slurm/*.sbatch", "version*_*/*.*", "version*_*/exercises/*.py", "version*_*/exercises/*/*.*")
START = {".py": '\nif __name__ == "__main__":', ".sh": "#!", ".sbatch": "#!"}  # in a file that is a command
RUN = {".py": "python", ".sh": "bash", ".sbatch": "sbatch"}


def scripts() -> list[Path]:
    """The commands in files, folder by folder."""
    found = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern)) if path.suffix in START]
    return [path for path in found if path.parent.name not in ("common", "handouts") and START[path.suffix] in path.read_text()]


@functools.cache
def help_of(script: Path) -> str:
    """What `--help` prints; a Python script runs in this process. UsageError: it imports a package that is not here."""
    if script.suffix != ".py":
        return subprocess.run(["bash", script, "--help"], capture_output=True, text=True, check=True).stdout
    output, path = io.StringIO(), [str(script.parent), *sys.path]
    called = mock.patch.multiple(sys, argv=[str(script), "--help"], path=path)
    try:
        with called, contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        raise UsageError(f"{script} cannot show its flags here: {error}") from error
    return output.getvalue()


def flags(script: Path) -> list[str]:
    """The flags in the usage of a Python script's `--help`; `--enable-X` stands for `--disable-X` too."""
    if script.suffix != ".py":
        return []
    found = dict.fromkeys(re.findall(r"--[a-z][\w-]+", help_of(script).partition("\n\n")[0]))
    return [flag for flag in found if flag.replace("--disable", "--enable") not in found or "--disable" not in flag]


def purpose(script: Path) -> str:
    """The first sentence of its docstring, or of the comment at its top."""
    text = script.read_text(encoding="utf-8")
    top = text.partition('"""')[2].partition('"""')[0] if script.suffix == ".py" else re.sub("^#!.*\n|^# ?", "", text, flags=re.M)
    return re.sub(":$", ".", re.split(r"(?<=[.?!]) ", " ".join(top.partition("\n\n")[0].split()))[0])


def commands() -> str:
    """A list for each folder: a command, its purpose, and its flags but those of training, which stand once.

    A command that a version before has too stands there alone.
    """
    targets = re.findall(r"^([a-z-]+):.*?## (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lines = ["In the root of the repository:", "", *(f"- `make {name}`: {text}" for name, text in targets)]
    versions = sorted(ROOT.glob("version*_*/tiny_llama_v*.py"))
    first = {*flags(versions[0])}
    training = first.union(*map(flags, versions))
    listed: set[str] = set()
    for folder, group in groupby(scripts(), lambda script: script.parent):
        if folder != ROOT:
            lines += ["", f"In `{folder.relative_to(ROOT).as_posix()}/`:", ""]
        for script in group:
            if script.name in listed:
                continue
            listed.add(script.name)
            elsewhere = set() if script == versions[0] else first if script in versions else training
            own = " ".join(flag for flag in flags(script) if flag not in elsewhere)
            lines.append(f"- `{RUN[script.suffix]} {script.name}`: {purpose(script)}" + (f" `{own}`" if own else ""))
    return "\n".join(lines) + "\n"
