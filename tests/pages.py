"""What the pages say, their links and the commands of their blocks, and the scripts of the versions
and their help.
"""

import contextlib
import functools
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

from tests.conftest import ROOT
from version2_pytorch_fused import tiny_llama_v2

V2, V3, V4 = (
    ROOT / name for name in ("version2_pytorch_fused", "version3_triton", "version4_ultra_fused")
)
GUARD = 'if __name__ == "__main__":'
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for path in ROOT.glob("version*_*/**/*.py")
    if GUARD in path.read_text(encoding="utf-8")
)
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ARGUMENTS = r"[^;|>&)]*"  # up to what ends a command in a shell line
CALL = re.compile(
    rf"\b(?:python3?|bash|torchrun(?: --[\w-]+(?:[= ][\w.:$]+)?)*) ([\w./-]+\.(?:py|sh)\b{ARGUMENTS})"
)
TESTS = re.compile(r"\bpytest ([\w./-]+\.py)(?: -k (\w+))?")


def commands(document: Path) -> list[str]:
    lines = [
        line.split("  #")[0].strip()
        for block in BLOCK.findall(document.read_text())
        for line in block.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


# What the script of a lesson replaces in Version 2, before it reads its flags.
REPLACED = {
    name: getattr(tiny_llama_v2, name) for name in ("swiglu", "TinyLlama", "make_optimizer")
}


@functools.cache
def help_of(script: Path) -> str:
    """What `--help` prints; a Python script runs in this process."""
    if script.suffix != ".py":
        return subprocess.run(
            ["bash", script, "--help"], capture_output=True, text=True, check=True
        ).stdout
    called = mock.patch.multiple(
        sys, argv=[str(script), "--help"], path=[str(script.parent), *sys.path]
    )
    with (
        called,
        mock.patch.multiple(tiny_llama_v2, **REPLACED),
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()
