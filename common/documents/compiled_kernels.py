"""What each kernel needs of a multiprocessor, from compiled/kernels.json (written by version3_triton/compile_kernels.py).

That file (schema "tiny-llama-compiled/1") holds `triton`, `command` and `rows`: target, dtype, file, size, kernel, blocks, warps,
stages, registers, spills, shared_bytes. compile_kernels.py says what the figures are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.analysis.output import tables
from common.files import read_json

SCHEMA = "tiny-llama-compiled/1"


def compiled(folder: Path) -> str:
    """A row per kernel, a column per target: the most registers, spills and KiB of shared memory that it needs."""
    content = read_json(folder / "kernels.json", SCHEMA)
    rows = content["rows"]
    targets, files = (list(dict.fromkeys(row[key] for row in rows)) for key in ("target", "file"))
    body = []
    for file, kernel in sorted(dict.fromkeys((row["file"], row["kernel"]) for row in rows), key=lambda key: files.index(key[0])):
        own = [row for row in rows if (row["file"], row["kernel"]) == (file, kernel)]
        body.append([file, kernel, *(_most([row for row in own if row["target"] == target]) for target in targets)])
    return f"{tables.markdown(['file', 'kernel', *targets], body)}\nCompiled with Triton {content['triton']}.\n"


def _most(rows: list[dict[str, Any]]) -> str:
    registers, spills, shared = (max(row[key] for row in rows) for key in ("registers", "spills", "shared_bytes"))
    return f"{registers}, {spills}, {tables.figure(shared / 1024)}"


TABLES: dict[str, Callable[..., str]] = {"compiled": compiled}
