"""Stand-ins for the profilers of AMD and NVIDIA, on a PATH of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import finished

SHELL_TOOLS = ("basename", "bash", "dirname", "grep", "mkdir", "mv", "rm", "sed", "tail")

# A stand-in notes its command line in $CALLS and runs the command that it was given. Its help is
# $OPTIONS.
STAND_IN = """
import json, os, subprocess, sys

tool, *arguments = sys.argv[1:]
if arguments[-1] in ("--help", "--help=all"):
    print(os.environ.get("OPTIONS", ""))
    sys.exit()
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([tool, *arguments]), file=calls)
if code := int(os.environ.get("FAIL_" + tool.replace("-", "_"), "0")):
    sys.exit(code)
os.environ["UNDER"] = tool
if tool == "ncu":
    with open(arguments[arguments.index("--log-file") + 1], "w") as log:
        print('"ID","Kernel Name","gpu__time_duration.sum"', file=log)
if "python" in arguments:
    try:
        sys.exit(subprocess.run(arguments[arguments.index("python") :]).returncode)
    except KeyboardInterrupt:
        sys.exit(1)
"""

# The script of a version: it prints its arguments and ends with $SCRIPT_CODE. Under the tool
# $WAITS_UNDER it waits for Ctrl-C.
SCRIPT = """
import json, os, signal, sys, time

if os.environ.get("WAITS_UNDER") == os.environ.get("UNDER", "none"):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    print("waiting", flush=True)
    for _ in range(600):  # a signal just before a sleep is seen after it
        time.sleep(1)
print(json.dumps(sys.argv[1:]))
sys.exit(int(os.environ.get("SCRIPT_CODE", "0")))
"""


class Machine:
    """A PATH that holds only what the test puts there, a working folder with a space in its name,
    and a version's script.
    """

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder, self.calls_file = (
            folder / "bin",
            folder / "a folder",
            folder / "calls",
        )
        self.script = self.folder / "a script.py"
        self.bin.mkdir()
        self.folder.mkdir()
        self.script.write_text(SCRIPT)
        (folder / "stand_in.py").write_text(STAND_IN)
        for tool in SHELL_TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.command("python", f'"{sys.executable}" "$@"')
        self.environment = os.environ | {"PATH": str(self.bin), "CALLS": str(self.calls_file)}

    def command(self, name: str, shell: str) -> None:
        """Puts a command on PATH."""
        (self.bin / name).write_text(f"#!/bin/sh\nexec {shell}\n")
        (self.bin / name).chmod(0o755)

    def tools(self, *names: str) -> None:
        for name in names:
            self.command(
                name, f'"{sys.executable}" -ES "{self.bin.parent / "stand_in.py"}" {name} "$@"'
            )

    def run(
        self,
        script: Path,
        *arguments: object,
        check: int = 0,
        seconds: float = 600,
        **environment: str,
    ) -> subprocess.CompletedProcess:
        return finished(
            ["bash", script, *arguments],
            self.folder,
            self.environment | environment,
            check,
            seconds,
        )

    @property
    def calls(self) -> list[list[str]]:
        """The command lines of the tools, in order."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [*map(json.loads, lines)]

    @property
    def called(self) -> list[str]:
        return [tool for tool, *_ in self.calls]


def value(call: list[str], flag: str) -> str:
    """The value of a flag; of several the last one, which is the one that counts."""
    return call[len(call) - call[::-1].index(flag)]
