"""Result files: their form on disk, and what they hold when they are read again."""

import json

from common.files import read_json, write_json

import pytest

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
