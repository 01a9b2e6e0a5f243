"""Reads and writes result files. A file is written whole or not at all, and what is read is checked before it is used.

The model of a schema of ours is a TypedDict class, of most in `common.records`. Its key `schema` is a Literal that names it.
"""

import functools
import gzip
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar, get_args

from common.errors import RunError, UsageError

from pydantic import Field, TypeAdapter, ValidationError

# Numbers in the models. They are finite, and JSON's true and false are not numbers. No amount is so large that sums, products
# or quotients of some amounts are not finite.
LARGEST = 2**63
Amount = Annotated[float, Field(ge=0, lt=LARGEST, allow_inf_nan=False)]
PositiveAmount = Annotated[float, Field(gt=0, lt=LARGEST, allow_inf_nan=False)]
Integer = Annotated[int, Field(ge=-LARGEST, lt=LARGEST)]
Number = Annotated[float, Field(gt=-LARGEST, lt=LARGEST, allow_inf_nan=False)]
Content = TypeVar("Content")


class _Uses(NamedTuple):
    """The files of the command that runs: those that it has read, and those that it writes."""

    read: set[Path]
    written: dict[Path, str]  # with the flag that named each, or "" once it is written


_uses: ContextVar[_Uses | None] = ContextVar("uses", default=None)
EXPANDED, UNPACKED = 100, 2**26  # times the size of a gzip file, bytes; traces and profiles expand 10 to 20 times
WIDTH = 130  # characters of a line of JSON, above which an object takes several lines


@contextmanager
def inputs_kept(kept: bool = True) -> Iterator[None]:
    """For a command: `opened` and `writable_file` refuse a file that is an input and an output, or that two flags would write."""
    token = _uses.set(_Uses(set(), {}) if kept else None)  # None during a search, which looks into files that are no inputs
    try:
        yield
    finally:
        _uses.reset(token)


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def writable_folder(folder: Path, flag: str) -> Path:
    """Makes `folder` if need be and checks that files can be created in it. UsageError: names `flag` and the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{flag}: cannot write in {folder}: {error.strerror}; name a folder that you can write to") from error
    return folder


def writable_file(path: Path, flag: str) -> Path:
    """Checks, before any work is done, that `path` can be written: its folder, and that it is no folder, device, loop of links
    or other file of the command's.

    UsageError: names `flag` and the reason.
    """
    try:
        exists = stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        exists = None  # a folder that is missing or is a file is the next check's
    except OSError as error:
        raise UsageError(f"{flag}: cannot write {path}: {error.strerror}; name a file that can be written") from error
    if not path.name or exists not in (None, stat.S_IFREG):
        what = "is a folder: name a file in it" if path.is_dir() else "is not a file: name one that can be written"
        raise UsageError(f"{flag}: {path} {what}")
    writable_folder((path.resolve() if path.is_symlink() else path).parent, flag)
    if uses := _uses.get():
        real = path.resolve()
        if any(_same(real, other) for other in uses.read):
            raise UsageError(f"{flag}: {path} is an input of this command: name another file")
        if others := [named for other, named in uses.written.items() if named not in ("", flag) and _same(real, other)]:
            raise UsageError(f"{flag} and {others[0]} would both write {path}: name another file or folder")
        uses.written[real] = flag
    return path


@contextmanager
def opened(path: Path, flag: str = "") -> Iterator[BinaryIO]:
    """Opens a file that `flag` named. A pipe, or a file of the kernel's, is read into a temporary file first, to be read twice.

    UsageError: it is a pipe that no process writes to, a device or a file of the kernel's, which need never end, or an output of
    the command. OSError: it cannot be opened.
    """
    with open(path, "rb", opener=without_waiting) as file:
        if uses := _uses.get():
            real = path.resolve()
            by = next((named for other, named in uses.written.items() if _same(real, other)), None)
            if by:
                raise UsageError(f"{by}: {path} is an input of this command: name another file")
            if by is None:
                uses.read.add(real)
        regular = path.is_file()
        if regular and path.stat().st_size:
            yield file
            return
        if path.is_char_device() and not file.isatty():
            raise UsageError(f"{flag} {path} is a device: give a file".lstrip())
        with tempfile.TemporaryFile() as copy:
            try:
                start = os.read(file.fileno(), 1)
            except BlockingIOError:  # there is a writer, which has written nothing so far
                start = None
            if start == b"" and path.is_fifo():
                raise UsageError(f"{flag} {path} is a pipe that no process writes to: give a file".lstrip())
            os.set_blocking(file.fileno(), not regular)
            copy.write(start or b"")
            shutil.copyfileobj(file, copy)
            if file.read(1) is None:  # as of /proc/kmsg
                raise UsageError(f"{flag} {path} has no end: give a file that has".lstrip())
            copy.seek(0)
            yield copy


class _Unpacked(gzip.GzipFile):
    """The content of a gzip file, as far as EXPANDED allows."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        super().__init__(fileobj=file)
        self.path, self.most = path, max(UNPACKED, EXPANDED * size)

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(self.most + 1 if size is None or size < 0 else size)
        if self.tell() > self.most:
            raise UsageError(f"{self.path} expands to more than {EXPANDED} times its size: unpack it, if that is meant to be")
        return content


def unpacked(path: Path, file: BinaryIO) -> BinaryIO | gzip.GzipFile:
    """A file that `opened` gave, or its content if packed by gzip. UsageError, on reading: it exceeds UNPACKED and EXPANDED."""
    packed, size = file.read(2) == b"\x1f\x8b", file.seek(0, os.SEEK_END)
    file.seek(0)
    return _Unpacked(path, file, size) if packed else file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what goes wrong while `path` is opened and read into a UsageError: it cannot be read, or is a damaged gzip file."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file (cut off?): {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """The whole file, unpacked, as text. UsageError: as `reading` and `unpacked`."""
    with reading(path), opened(path) as file:
        return unpacked(path, file).read().decode("utf-8-sig", errors="replace")


def without_waiting(path: str, flags: int) -> int:
    """For `open`: an opener that waits for no other process if `path` is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`. Half a pair of surrogates, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    write_bytes(path, text.encode("utf-8", errors="replace"))


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no one can foresee, so that nobody can have put a link there, and at most 255 bytes long."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")


def write_bytes(path: Path, content: bytes) -> None:
    """Writes under a temporary name and renames, so that `path` never holds half a file; a link stays one."""
    path = path.resolve()
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:  # a file that was not there before, and no link
            file.write(content)
        temporary.replace(path)
        if uses := _uses.get():
            uses.written[path] = ""
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON in the form of `json_lines`; with gzip, and the same bytes for the same content, if `path` ends in .gz."""
    encoded = f"{json_lines(content)}\n".encode()
    write_bytes(path, gzip.compress(encoded, mtime=0) if path.suffix == ".gz" else encoded)


def write_measurement(path: Path, content: Any, flag: str) -> None:
    """Writes JSON; where that fails (a full disk), prints it on a line. RunError: it failed; names file, `flag` and reason."""
    try:
        write_json(path, content)
    except OSError as error:
        line = json.dumps(content)
        try:
            print(line, flush=True)
        except OSError:  # standard output is full or closed too
            print(line, file=sys.stderr, flush=True)
        raise RunError(f"cannot write {path} ({flag}): {error.strerror}; it was printed instead, as JSON") from error


def json_lines(content: Any, indent: str = "") -> str:
    """JSON with one row a line, so that a diff of two files shows which rows differ.

    A list of lists or objects has one line an element, and an object that is wider than WIDTH has one line a key. Everything
    else stands on one line: short objects, text, and lists of numbers of any length.
    """
    line = json.dumps(content)
    inner = indent + " "
    if isinstance(content, dict) and len(indent + line) > WIDTH:
        rows = [f"{json.dumps(str(key))}: {json_lines(value, inner)}" for key, value in content.items()]
    elif isinstance(content, list | tuple) and any(isinstance(row, dict | list | tuple) for row in content):
        rows = [json.dumps(row) for row in content]
    else:
        return line
    return f"{line[0]}\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}{line[-1]}"


def checksum(path: Path) -> str:
    """The sha256 of a file, which need not fit into memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def integer(digits: str) -> int | float:
    """An integer of 64 bits; a longer one becomes a float, so that the models, which bound floats, refuse it by its field."""
    number = int(digits) if len(digits) <= 20 else float(digits)
    return number if -LARGEST <= number < LARGEST else float(number)


def read_json(path: Path, schema: str | None = None) -> Any:
    """Content of a .json or .json.gz file, of a schema if one is given. UsageError: it is missing, damaged, or of another."""
    text = read_text(path)
    if not text.strip():
        raise UsageError(f"{path} is empty")
    try:
        content = json.loads(text, parse_int=integer)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON or is cut off: {error.msg} at line {error.lineno}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is damaged: its lists or objects are nested too deep") from error
    if schema is not None and (not isinstance(content, dict) or content.get("schema") != schema):
        found = content.get("schema", "none") if isinstance(content, dict) else "none"
        raise UsageError(f"{path} is not a file of schema {schema} (found: {found})")
    return content


def read(path: Path, model: type[Content]) -> Content:
    """Content of a JSON file of our own, as plain dictionaries and lists.

    Args:
        model: the TypedDict class of its schema. Keys that the model does not know are allowed, and kept.

    UsageError: as `read_json`, or a key is missing, or a value has the wrong type or is out of range.
    """
    return check(path, read_json(path, schema_of(model)), model)


def schema_of(model: type) -> str:
    """The schema that a model names by the Literal of its key `schema`."""
    return get_args(model.__annotations__["schema"])[0]


def check(path: Path, content: Any, model: type[Content], place: str = "") -> Content:
    """The content of `path`, unchanged. UsageError: it does not fit the model; names the first wrong field, after `place`."""
    try:
        _adapter(model).validate_python(content, strict=True)  # type: ignore[arg-type]  # mypy: a TypedDict class has no hash
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = place + ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{path}: {field}: {first['msg']}") from error
    return content


@functools.cache
def _adapter(model: Any) -> TypeAdapter:
    return TypeAdapter(model)
