"""Result files: their form on disk, and what they hold when they are read again."""

import json
from typing import Literal

from common.errors import RunError, UsageError
from common.files import Amount, read, read_json, write_json, write_text

import pytest
from pydantic import PositiveInt
from typing_extensions import TypedDict

CONTENT = {
    "schema": "x/1", "device": {"name": "X", "threads": 2}, "empty": [], "missing": None, "all": [0.1] * 300,
    "rows": [{"kernel": "forward", "blocks": [64, 32]}, {"kernel": "backward", "text": "a" * 300}],
    "wide": {"one": "b" * 80, "two": {"three": "c" * 120, "pairs": [[1, 2], [3, 4]]}},
}  # fmt: skip


@pytest.mark.parametrize("name", ["result.json", "result.json.gz"])
def test_what_was_written_is_read_again(tmp_path, name):
    write_json(tmp_path / name, CONTENT)
    assert read_json(tmp_path / name) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_row_is_a_line_and_a_list_of_numbers_too(tmp_path):
    write_json(tmp_path / "result.json", CONTENT)
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert f' "all": {json.dumps(CONTENT["all"])},' in lines
    assert ' "device": {"name": "X", "threads": 2},' in lines
    assert all(any(line.strip().rstrip(",") == json.dumps(row) for line in lines) for row in [*CONTENT["rows"], [1, 2], [3, 4]])


def test_compressed_files_of_equal_content_are_equal(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        write_json(tmp_path / name, CONTENT)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_nothing_is_left_of_content_that_cannot_be_written(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "result.json", {"path": tmp_path})
    assert not list(tmp_path.iterdir())


def test_a_link_to_a_file_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "record.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink() and read_json(tmp_path / "record.json") == {"a": 1}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_what_is_nested_too_deep_is_refused(tmp_path, text):
    (tmp_path / "deep.json").write_text(text)
    with pytest.raises(UsageError, match="deep.json is damaged: its lists or objects are nested too deep"):
        read_json(tmp_path / "deep.json")


class Model(TypedDict):
    schema: Literal["x/1"]
    count: PositiveInt
    amount: Amount


@pytest.mark.parametrize("key, others", [("count", '"amount": 1'), ("amount", '"count": 1')])
@pytest.mark.parametrize("value", ["9" * 6000, "-1", "NaN", "Infinity", "1e400", str(10**400), str(2**64), "true", "null", '"1"'])
def test_a_number_that_is_none_is_refused_by_its_field(tmp_path, key, others, value):
    (tmp_path / "a.json").write_text(f'{{"schema": "x/1", {others}, "{key}": {value}}}')
    with pytest.raises(UsageError, match=f"a.json: {key}: Input should be"):
        read(tmp_path / "a.json", Model)


def test_integers_of_64_bits_stay_exact(tmp_path):
    (tmp_path / "a.json").write_text(f"[{2**63 - 1}, {-(2**63)}, 0]")
    assert read_json(tmp_path / "a.json") == [2**63 - 1, -(2**63), 0]


def test_text_that_utf8_cannot_hold_is_written(tmp_path):
    write_text(tmp_path / "a.txt", "a\ud800b")
    assert (tmp_path / "a.txt").read_text() == "a?b"


def test_a_message_is_one_line_however_long_and_odd_a_name_is():
    for kind in (UsageError, RunError):
        message = str(kind(f"begin \x1b[31m\n{'x' * 100_000} end"))
        assert message.isprintable() and message.startswith("begin  [31m xx") and message.endswith("x end")
        assert len(message) < 3000
