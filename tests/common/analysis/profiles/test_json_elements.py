"""The elements of a list in a JSON file, one at a time: the same as those of the whole, however the file is cut into parts."""

import gzip
import json
from itertools import islice
from pathlib import Path

from common.analysis.profiles import json_elements
from common.errors import UsageError

import pytest

ROWS = [{"a": [1, -2.5e3, {"b": None}]}, 'text with \\ " \n \u00e9 ] }', [], {}, 12345678901, True, [[1], {"rows": [2]}], 0]
CONTENT = {"before": {"rows": [9], "n": 1.5}, "rows": ROWS, "after": [1, 2]}
TEXTS = [json.dumps(CONTENT), json.dumps(CONTENT, indent=3, ensure_ascii=False), '{"rows":[]}', ' {"rows" : [ ] } \n']


def read(path: Path, content: bytes | str) -> list:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(json_elements.elements(path, "rows", "has no rows"))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_the_elements_are_those_of_the_whole(tmp_path, monkeypatch, text, size):
    monkeypatch.setattr(json_elements, "BLOCK", size)
    assert read(tmp_path / "file.json", text) == json.loads(text)["rows"]
    assert read(tmp_path / "file.json.gz", gzip.compress(text.encode())) == json.loads(text)["rows"]


@pytest.mark.parametrize("size", [3, 1000])
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, monkeypatch, size):
    monkeypatch.setattr(json_elements, "BLOCK", size)
    for end in range(len(TEXTS[0])):
        with pytest.raises(UsageError, match="file.json is (not JSON or is cut off: .*|empty)$"):
            read(tmp_path / "file.json", TEXTS[0][:end])


@pytest.mark.parametrize(("content", "message"), [
    ("", "is empty"),
    ("[1, 2]", "has no rows$"),
    ('{"a": [1]}', "has no rows$"),
    ('{"rows": {}}', "has no rows$"),
    ('{"rows": [1]} x', "is not JSON or is cut off: parse error: trailing garbage$"),
    ('{\n"rows": [1,\n\n tru]}' + " " * 100, "is not JSON or is cut off: lexical error: invalid string in json text.$"),
    ('{\n"rows": [1\n 2]}', "after array element, I expect ',' or ']'$"),
    ('{1: [1], "rows": []}', "invalid object key .must be a string.$"),
    ('{"rows": [' + "[" * 100_000, "nested too deep"),
    (gzip.compress(b'{"rows": [1, 2]}')[:-9], "is a damaged gzip file"),
    (b"\x1f\x8bno gzip", "cannot read|damaged gzip"),
], ids=range(11))  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path, content, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path / "file.json", content)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "9" * 30, "18446744073709551615"])
def test_a_number_that_no_model_takes_makes_only_its_own_field_unreadable(tmp_path, number):
    """One that 64 bits hold stays as it is, and so does text."""
    text = f'{{"rows": [{{"a": {number}, "b": 1}}, [{number}, -9223372036854775807], "NaN", 9223372036854775807]}}'
    assert read(tmp_path / "file.json", text) == [{"a": None, "b": 1}, [None, 1 - 2**63], "NaN", 2**63 - 1]


def test_bytes_that_are_not_text_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(json_elements, "BLOCK", 1)
    assert read(tmp_path / "file.json", '{"rows": ["é'.encode() + b'\xff"]}') == ["é�"]


def test_the_first_elements_are_there_before_the_rest_is_read(tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"rows": [' + "1, " * 2**20 + "oh")
    assert list(islice(json_elements.elements(path, "rows", ""), 10)) == [1] * 10
