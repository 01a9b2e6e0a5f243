"""Reading and writing result files: whole or not at all, and a clear word about anything that is not one of ours."""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from common.errors import UsageError


def writable_folder(folder: Path, flag: str) -> Path:
    """Makes `folder` if need be and checks that files can be created in it, before any work is done.

    Raises:
        UsageError: names `flag` and the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{flag}: cannot write in {folder}: {error.strerror}; name a folder that you can write to") from error
    return folder


def writable_file(path: Path, flag: str) -> Path:
    """Checks, before any work is done, that `path` can be written: its folder, and that it is no folder or device.

    Raises:
        UsageError: names `flag` and the reason.
    """
    if not path.name or (path.exists() and not path.is_file()):
        what = "is a folder: name a file in it" if path.is_dir() else "is not a file: name one that can be written"
        raise UsageError(f"{flag}: {path} {what}")
    writable_folder(path.parent, flag)
    return path


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name and renames, so that `path` never holds half a file; a link stays one."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path, schema: str | None = None) -> Any:
    """Content of a .json or .json.gz file.

    Args:
        schema: the value that the key "schema" must have, for files of our own.

    Raises:
        UsageError: the file is missing, empty, cut off, not JSON, or of another schema.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", errors="replace")
    except (EOFError, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file (cut off?): {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if not text.strip():
        raise UsageError(f"{path} is empty")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON or is cut off: {error.msg} at line {error.lineno}") from error
    if schema is not None and (not isinstance(content, dict) or content.get("schema") != schema):
        found = content.get("schema", "none") if isinstance(content, dict) else "none"
        raise UsageError(f"{path} is not a file of schema {schema} (found: {found})")
    return content
