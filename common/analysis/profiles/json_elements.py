"""Reads the elements of a list in a JSON file one at a time, so that a file of any size takes the memory of a few of them."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from common.errors import UsageError
from common.files import integer, opened

CHARACTERS = 2**20  # that are read at once
DECODER, WHITE_SPACE = json.JSONDecoder(parse_int=integer), re.compile(r"[ \t\n\r]*")
REACH = 16  # characters past an error's position that can turn it into valid JSON, were they there: the rest of a literal


def elements(path: Path, key: str, otherwise: str) -> Iterator[Any]:
    """The elements of the list under a key of the object in a .json or .json.gz file.

    Args:
        otherwise: what to say about a file that holds no object, or no list under this key.

    Raises:
        UsageError: the file is that, or it is missing, empty, cut off, not JSON or nested too deep.
    """
    try:
        with opened(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            unpacked = gzip.GzipFile(fileobj=file) if packed else file
            yield from _elements(_Text(path, io.TextIOWrapper(unpacked, "utf-8", errors="replace")), key, otherwise)
    except (EOFError, zlib.error) as error:
        raise UsageError(f"{path} is a damaged gzip file (cut off?): {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _elements(text: "_Text", key: str, otherwise: str) -> Iterator[Any]:
    if not text.next():
        raise UsageError(f"{text.path} is empty")
    found = False
    if text.next() == "{":
        for _ in text.members("}"):
            if text.next() != '"':
                raise text.damaged("Expecting property name enclosed in double quotes")
            name = text.value()
            text.expect(":")
            if name == key and text.next() == "[":
                found = True
                for _ in text.members("]"):
                    yield text.value()
            else:
                text.value()
    else:
        text.value()
    if text.next():
        raise text.damaged("Extra data")
    if not found:
        raise UsageError(f"{text.path} {otherwise}")


class _Text:
    """The text of a JSON file, of which only the part that is being read is in memory."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self.file = path, file
        self.text, self.position, self.ended = "", 0, False
        self.lines = 1  # of what was dropped from the text, and one

    def next(self) -> str:
        """The next character that is not white space, which it does not take; none at the end."""
        while True:
            self.position = WHITE_SPACE.match(self.text, self.position).end()
            if self.position < len(self.text) or self.ended:
                return self.text[self.position : self.position + 1]
            self._read()

    def expect(self, characters: str) -> str:
        """Takes the next character, which must be one of these."""
        found = self.next()
        if not found or found not in characters:
            raise self.damaged(f"Expecting {' or '.join(characters)}")
        self.position += 1
        return found

    def members(self, end: str) -> Iterator[None]:
        """Stops before each member of a list or an object, which the caller takes, up to its end."""
        self.position += 1
        if self.next() == end:
            self.position += 1
            return
        yield
        while self.expect(f",{end}") == ",":
            yield

    def value(self) -> Any:
        """Takes the next value; reads on while the text ends within it."""
        self.next()
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                within = error.msg.startswith("Unterminated string") or error.pos + REACH >= len(self.text)
                if self.ended or not within:
                    self.position = error.pos
                    raise self.damaged(error.msg) from error
            except RecursionError as error:
                raise self.damaged("lists or objects are nested too deep") from error
            else:
                if end < len(self.text) or self.ended:  # else it could be a part of a number
                    self.position = end
                    return value
            self._read()

    def damaged(self, problem: str) -> UsageError:
        line = self.lines + self.text.count("\n", 0, self.position)
        return UsageError(f"{self.path} is not JSON or is cut off: {problem} at line {line}")

    def _read(self) -> None:
        """Reads on, twice as much each time if one value is long."""
        rest = self.text[self.position :]
        self.lines += self.text.count("\n", 0, self.position)
        more = self.file.read(max(CHARACTERS, len(rest)))
        self.text, self.position, self.ended = rest + more, 0, not more
