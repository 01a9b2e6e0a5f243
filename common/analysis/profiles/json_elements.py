"""Reads the elements of a list in a JSON file one at a time, so that a file of any size takes the memory of a few of them."""

import codecs
import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import UsageError
from common.files import LARGEST, opened, reading, unpacked

import ijson

BLOCK = 2**16  # bytes that are read at once
DEEPEST = 1000  # lists and objects that may begin in a block and not end in it: ijson's paths to them take memory by its square
NUMBER = re.compile(rb"(?<=[\s:,\[])(-?\d{19,}|NaN|-?Infinity)(?=[\s,\]}])")
DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdigit() else ord(" ") for byte in range(128)) + b" " * 128


def elements(path: Path, key: str, otherwise: str) -> Iterator[Any]:
    """The elements of the list under a key of the object in a .json or .json.gz file; `otherwise` is what to say about a file
    that holds no object, or no list under this key. With an empty key the file is the list, and may lack its end.
    """
    prefix = f"{key}.item".lstrip(".")
    try:
        with reading(path), opened(path) as file:
            content, found = unpacked(path, file), False
            for element in ijson.items(_Text(path, content), prefix, use_float=True, buf_size=BLOCK):
                found = True
                yield element
            if found:
                return
            content.seek(0)
            events = ijson.parse(_Text(path, content), buf_size=BLOCK)
            if not any(event == "start_array" and prefix == key for prefix, event, _ in events):
                raise UsageError(f"{path} {otherwise}")
    except ijson.JSONError as error:
        if not key and "premature EOF" in str(error):
            return
        raise UsageError(f"{path} is not JSON or is cut off: {str(error).splitlines()[0]}") from error


class _Text:
    """A file that ijson reads, without what would make ijson refuse or not survive it.

    Bytes that are not UTF-8 are replaced. NaN, infinities, and integers of more than 64 bits become null, which no model takes.
    """

    def __init__(self, path: Path, file: BinaryIO | gzip.GzipFile) -> None:
        self.path, self.file, self.empty = path, file, True
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")

    def read(self, size: int) -> bytes:
        """A block, as far as the end of a line that begins in it and is not too long, so that numbers are whole."""
        read = self.file.read(size) + self.file.readline(size)
        block = self.decoder.decode(read).encode()
        self.empty = self.empty and not block.strip()
        if self.empty and size and not read:
            raise UsageError(f"{self.path} is empty")
        if sum(map(block.count, (b"[", b"{"))) - sum(map(block.count, (b"]", b"}"))) > DEEPEST:
            raise UsageError(f"{self.path} is not JSON or is cut off: lists or objects are nested too deep")
        if b"NaN" in block or b"Infinity" in block or b"0" * 19 in block.translate(DIGITS_AS_ZEROS):
            block = NUMBER.sub(lambda found: found[0] if _fits(found[0]) else b"null", block)
        return block


def _fits(number: bytes) -> bool:
    return len(number) <= 20 and number[-1:].isdigit() and abs(int(number)) < LARGEST
