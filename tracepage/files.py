"""Reads and writes result files. A file is written whole or not at all, and what is read is checked
before it is used.

The model of a schema of ours is a TypedDict class, of most in `tracepage.records`. Its key `schema`
is a Literal that names it.
"""

import codecs
import functools
import gc
import gzip
import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, get_args

from tracepage.errors import RunError, UsageError

from pydantic import Field, TypeAdapter, ValidationError

# Numbers in the models. They are finite, and JSON's true and false are not numbers.
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveAmount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Content = TypeVar("Content")

UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
WIDTH = 130  # characters of a line of JSON, above which an object takes several lines
STREAMS = (Path("/dev/stdout"), Path("/dev/stderr"))


def writable_folder(folder: Path, flag: str) -> Path:
    """Makes `folder` if need be and checks that files can be created in it. UsageError: names
    `flag` and the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag}: cannot write in {folder}: {error.strerror}; "
            "name a folder that you can write to"
        ) from error
    return folder


def writable_file(path: Path, flag: str, inputs: Iterable[Path | None] = ()) -> Path:
    """Checks, before any work is done, that `path` can be written and is none of the inputs, and
    lies in none of the folders among them.

    UsageError: it names `flag` and the reason.
    """
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder: name a file in it")
    target = _without_links(path)
    if any(target.is_relative_to(_without_links(file)) for file in inputs if file):
        raise UsageError(f"{flag}: {path} is an input of this command: name another file")
    if path.is_char_device():  # such as /dev/null
        return path
    if target.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{flag}: {path} is a pipe or a loop of links: name a file")
    streams = [stream for stream in STREAMS if stream.exists()]
    if path.exists() and any(map(path.samefile, streams)):
        raise UsageError(f"{flag}: this command prints into {path}: name another file")
    writable_folder(target.parent, flag)
    return path


def _without_links(path: Path) -> Path:
    """Where the links lead; a loop of them leads to one of its links."""
    return Path(os.path.realpath(path))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes under a temporary name and renames, so that `path` never holds half a file. A device
    is written into.

    OSError: it names `path`.
    """
    if path.is_char_device():
        path.write_bytes(content)
        return
    path = _without_links(path)  # a link stays one
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # A full disk names no file.
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`. Half a pair of surrogates, which JSON can hold and UTF-8 cannot, becomes a
    question mark.
    """
    write_bytes(path, text.encode("utf-8", errors="replace"))


def write_json(path: Path, content: Any) -> None:
    """Writes JSON in the form of `json_lines`; with gzip, and the same bytes for the same content,
    if `path` ends in .gz.
    """
    encoded = f"{json_lines(content)}\n".encode()
    write_bytes(path, gzip.compress(encoded, mtime=0) if path.suffix == ".gz" else encoded)


def write_measurement(path: Path, content: Any, flag: str) -> None:
    """Writes JSON; where that fails (a full disk), prints it on a line. RunError: it failed; names
    file, `flag` and reason.
    """
    try:
        write_json(path, content)
    except OSError as error:
        print(json.dumps(content), flush=True)
        raise RunError(
            f"cannot write {path} ({flag}): {error.strerror}; it was printed instead, as JSON"
        ) from error


def json_lines(content: Any, indent: str = "") -> str:
    """JSON with one row a line, so that a diff of two files shows which rows differ.

    A list of lists or objects has one line an element, and an object that is wider than WIDTH has
    one line a key. Everything else stands on one line: short objects, text, and lists of numbers of
    any length.
    """
    line = json.dumps(content)
    inner = indent + " "
    if isinstance(content, dict) and len(indent + line) > WIDTH:
        rows = [
            f"{json.dumps(str(key))}: {json_lines(value, inner)}" for key, value in content.items()
        ]
    elif isinstance(content, list | tuple) and any(
        isinstance(row, dict | list | tuple) for row in content
    ):
        rows = [json.dumps(row) for row in content]
    else:
        return line
    return f"{line[0]}\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}{line[-1]}"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The content of an input, unpacked if it is packed by gzip. UsageError: it cannot be read, or
    is a damaged gzip file.
    """
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield gzip.GzipFile(fileobj=file) if packed else file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file (cut off?): {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def many_objects() -> Iterator[None]:
    """Millions of new containers would be searched for circles again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def read_text(path: Path) -> str:
    """The whole file, unpacked, as text with line ends of Unix: UTF-8, or UTF-16 that begins with
    its mark. UsageError: as `opened`.
    """
    with opened(path) as file:
        content = file.read()
    encoding = "utf-16" if content.startswith(UTF16) else "utf-8-sig"
    text = io.TextIOWrapper(io.BytesIO(content), encoding, errors="replace")
    return text.read()


def read_json(path: Path, schema: str | None = None) -> Any:
    """Content of a .json or .json.gz file, of a schema if one is given. UsageError: it is missing,
    damaged, or of another.
    """
    text = read_text(path)
    if not text.strip():
        raise UsageError(f"{path} is empty")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON or is cut off: {error}") from error
    written = content.get("schema", "none") if isinstance(content, dict) else "none"
    if schema not in (None, written):
        raise UsageError(f"{path} is not a file of schema {schema} (found: {written})")
    return content


def read(path: Path, model: type[Content]) -> Content:
    """Content of a JSON file of our own, as plain dictionaries and lists.

    Args:
        model: the TypedDict class of its schema. Keys that the model does not know are allowed, and
        kept.

    UsageError: as `read_json`, or a key is missing, or a value has the wrong type or is out of
    range.
    """
    return check(path, read_json(path, schema_of(model)), model)


def schema_of(model: type) -> str:
    """The schema that a model names by the Literal of its key `schema`."""
    return get_args(model.__annotations__["schema"])[0]


def check(path: Path, content: Any, model: type[Content]) -> Content:
    """The content of `path`, unchanged. UsageError: it does not fit the model; names the first
    wrong field.
    """
    try:
        _adapter(model).validate_python(content, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{path}: {field}: {first['msg']}") from error
    return content


@functools.cache
def _adapter(model: Any) -> TypeAdapter:
    return TypeAdapter(model)
