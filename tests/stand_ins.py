"""Stand-ins for the profilers of AMD and NVIDIA, on a PATH of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SHELL_TOOLS = ("basename", "bash", "dirname", "grep", "mkdir", "mv", "rm", "sed")

# A stand-in notes its command line in $CALLS and runs the command that it was given. It knows the flags that our scripts may
# use, with the number of values of each, and refuses all others, like a release of the real tool that lacks them.
STAND_IN = """
import json, os, subprocess, sys

tool, *arguments = sys.argv[1:]
release = float(os.environ.get("RELEASE", "3.8"))  # of rocprof-compute
FLAGS = {
    "rocprofv3": {"--kernel-trace": 0, "--hip-trace": 0, "--sys-trace": 0, "--marker-trace": 0, "--stats": 0, "-S": 0,
                  "--truncate-kernels": 0, "--output-format": 1, "-f": 1, "-d": 1, "-o": 1, "--output-file": 1, "-i": 1},
    "rocprof-sys-run": {"--profile": 0, "--trace": 0, "--output": 1},
    "rocprof-compute": {"-n": 1, "--no-roof": 0, "--roof-only": 0, "--device": 1, "-b": 1}
        | ({"--path": 1} if release < 3.7 else {})
        | ({"--output-directory": 1} if release >= 3.5 else {})
        | ({"--overwrite": 0} if release >= 3.8 else {}),
    "ncu": {"--clock-control": 1, "--nvtx": 0, "--launch-count": 1, "--metrics": 1, "--csv": 0, "--page": 1, "--print-units": 1,
            "--log-file": 1},
    "nsys": {"--trace": 1, "--cuda-graph-trace": 1, "--force-overwrite": 1, "--output": 1},
    "nvidia-smi": {"-L": 0},
}[tool]
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([tool, *arguments]), file=calls)

rest = list(arguments)
if tool in ("rocprof-compute", "nsys"):
    assert rest.pop(0) == "profile"
if rest == ["--help"]:
    print("usage: profile", *FLAGS)
    sys.exit()
values = {}
while rest and rest[0].startswith("-") and rest[0] != "--":
    flag, equals, value = rest.pop(0).partition("=")
    if flag not in FLAGS:
        print(f"{tool}: error: unrecognized arguments: {flag}", file=sys.stderr)
        sys.exit(2)
    values[flag] = [value] if equals else [rest.pop(0) for _ in range(FLAGS[flag])]
if tool.startswith("rocprof"):
    assert rest.pop(0) == "--"
if code := int(os.environ.get("FAIL_" + tool.replace("-", "_"), "0")):
    sys.exit(code)
os.environ["UNDER"] = tool
runs = 1
if tool == "rocprof-compute":
    [target] = values.get("--output-directory") or values["--path"]
    assert ".." not in target
    if os.path.exists(target) and "--overwrite" not in values and release >= 3.8:
        sys.exit("the target is not empty")
    os.makedirs(target, exist_ok=True)
    runs = 3
if tool == "ncu":
    with open(values["--log-file"][0], "w") as log:
        print("==PROF== Connected to process 1", file=log)
        if not os.environ.get("NO_COUNTERS"):
            print('"ID","Kernel Name","gpu__time_duration.sum"', file=log)
if rest:
    try:
        sys.exit(max(subprocess.run(rest).returncode for _ in range(runs)))
    except KeyboardInterrupt:
        sys.exit(1)
"""

# The script of a version: it prints its arguments and ends with $SCRIPT_CODE. Under the tool $WAITS_UNDER it waits for Ctrl-C.
SCRIPT = """
import json, os, signal, sys, time

if os.environ.get("WAITS_UNDER") == os.environ.get("UNDER", "none"):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    print("waiting", flush=True)
    time.sleep(60)
print(json.dumps(sys.argv[1:]))
sys.exit(int(os.environ.get("SCRIPT_CODE", "0")))
"""


class Machine:
    """A PATH that holds only what the test puts there, a working folder with a space in its name, and a version's script."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder, self.calls_file = folder / "bin", folder / "a folder", folder / "calls"
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
            self.command(name, f'"{sys.executable}" -IS "{self.bin.parent / "stand_in.py"}" {name} "$@"')

    def run(
        self, script: Path, *arguments: object, check: int = 0, seconds: float = 120, **environment: str
    ) -> subprocess.CompletedProcess:
        done = subprocess.run(
            ["bash", str(script), *map(str, arguments)],
            cwd=self.folder, env=self.environment | environment, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        assert done.returncode == check, f"exit code {done.returncode}, not {check}\n{done.stdout}\n{done.stderr}"
        return done

    @property
    def calls(self) -> list[list[str]]:
        """The command lines of the tools, in order, without those that ask for help."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [call for call in map(json.loads, lines) if "--help" not in call]

    @property
    def called(self) -> list[str]:
        return [tool for tool, *_ in self.calls]


def value(call: list[str], flag: str) -> str:
    """The value of a flag; of several the last one, which is the one that counts."""
    return call[len(call) - call[::-1].index(flag)]
