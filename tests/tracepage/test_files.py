"""Result files: their form on disk, and what they hold when they are read again."""

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Literal

from tracepage import files
from tracepage.errors import RunError, UsageError
from tracepage.files import (
    Amount,
    read,
    read_json,
    writable_file,
    write_json,
    write_measurement,
    write_text,
)

import pytest
from pydantic import PositiveInt
from typing_extensions import TypedDict

CONTENT = {
    "schema": "x/1",
    "device": {"name": "X", "threads": 2},
    "empty": [],
    "missing": None,
    "all": [0.1] * 300,
    "rows": [{"kernel": "forward", "blocks": [64, 32]}, {"kernel": "backward", "text": "a" * 300}],
    "wide": {"one": "b" * 80, "two": {"three": "c" * 120, "pairs": [[1, 2], [3, 4]]}},
}


def test_what_was_written_is_read_again(tmp_path):
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_json(tmp_path / name, CONTENT)
        assert read_json(tmp_path / name) == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.gz", "b.json.gz"]
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes(), (
        "no time of writing"
    )


def test_unwritable_content_and_a_full_disk_leave_the_folder_as_it_was(tmp_path, monkeypatch):
    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TypeError):
        write_json(tmp_path / "result.json", {"path": tmp_path})
    assert not list(tmp_path.iterdir())

    (tmp_path / "result.json").write_text("of an earlier run")
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left on device: '.*result.json'"):
        write_json(tmp_path / "result.json", CONTENT)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier run"]


def test_a_measurement_that_cannot_be_written_is_printed(tmp_path, capsys):
    (tmp_path / "out.json").mkdir()
    with pytest.raises(
        RunError,
        match=r"cannot write .*out.json \(--output\): Is a directory; it was printed instead",
    ):
        write_measurement(tmp_path / "out.json", CONTENT, "--output")
    assert json.loads(capsys.readouterr().out) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_an_output_is_checked_before_any_work(tmp_path):
    assert writable_file(tmp_path / "new/result.json", "--output").parent.is_dir()
    (tmp_path / "file").touch()
    for name, message in (
        ("new", "is a folder: name a file in it"),
        ("file/result.json", "cannot write in .*file"),
    ):
        with pytest.raises(UsageError, match=f"--output: .*{message}"):
            writable_file(tmp_path / name, "--output")


def test_an_input_is_no_output_also_behind_a_link(tmp_path):
    (tmp_path / "in.json").write_text("[]")
    (tmp_path / "link.json").symlink_to(tmp_path / "in.json")
    with pytest.raises(
        UsageError, match="link.json is an input of this command: name another file"
    ):
        writable_file(tmp_path / "link.json", "--output", (tmp_path / "in.json", None))
    assert (
        writable_file(tmp_path / "out.json", "--output", (tmp_path / "in.json",))
        == tmp_path / "out.json"
    )
    assert (tmp_path / "in.json").read_text() == "[]"
    write_text(tmp_path / "link.json", "{}")
    assert read_json(tmp_path / "in.json") == {} and (tmp_path / "link.json").is_symlink()


def test_an_input_is_no_output_in_its_folder_either(tmp_path):
    (tmp_path / "model").mkdir()
    for inside in (tmp_path / "model/config.json", tmp_path / "model/new/out.json"):
        with pytest.raises(UsageError, match="out.json|config.json is an input of this command"):
            writable_file(inside, "--output", [tmp_path / "model"])
    assert not (tmp_path / "model/new").exists()
    writable_file(tmp_path / "models/out.json", "--output", [tmp_path / "model"])


def test_a_device_is_written_into_also_behind_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to("/dev/null")
    for device in (Path("/dev/null"), tmp_path / "link.json"):
        write_json(writable_file(device, "--output"), CONTENT)
    assert Path("/dev/null").is_char_device() and (tmp_path / "link.json").is_symlink()
    assert not [path for path in Path("/dev").iterdir() if path.name.startswith(".null")]


def test_an_output_that_is_no_file_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    (tmp_path / "log.txt").touch()
    monkeypatch.setattr(files, "STREAMS", [tmp_path / "closed", tmp_path / "log.txt"])
    for name, message in (
        ("pipe", "pipe is a pipe or a loop of links: name a file"),
        ("loop", "loop is a pipe or a loop of links: name a file"),
        ("log.txt", "this command prints into .*log.txt: name another file"),
        ("", "is a folder: name a file in it"),
    ):
        with pytest.raises(UsageError, match=f"--output: .*{message}"):
            writable_file(tmp_path / name, "--output", [tmp_path / "input.json"])
    with pytest.raises(UsageError, match="input of this command"):
        writable_file(tmp_path / "loop", "--output", [tmp_path / "loop"])


REFUSED = [
    (b"", "a.json is empty"),
    (b"{", "a.json is not JSON or is cut off: .*line 1"),
    (b"[]", "not a file of schema x/1"),
    (b'{"schema": "y"}', r"not a file of schema x/1 \(found: y\)"),
    (b"[" * 100_000, "a.json is not JSON"),
    (gzip.compress(b"{}")[:-3], "a.json is a damaged gzip file"),
]


@pytest.mark.parametrize(
    ("content", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED]
)
def test_what_is_no_result_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_json(tmp_path / "a.json", "x/1")
    with pytest.raises(UsageError, match="cannot read .*missing.json: No such file or directory"):
        read_json(tmp_path / "missing.json")


class Model(TypedDict):
    schema: Literal["x/1"]
    count: PositiveInt
    amount: Amount


@pytest.mark.parametrize("key, others", [("count", '"amount": 1'), ("amount", '"count": 1')])
@pytest.mark.parametrize("value", ["-1", "NaN", "1e400", "true", "null", '"1"'])
def test_a_number_that_is_none_is_refused_by_its_field(tmp_path, key, others, value):
    (tmp_path / "a.json").write_text(f'{{"schema": "x/1", {others}, "{key}": {value}}}')
    with pytest.raises(UsageError, match=f"a.json: {key}: Input should be"):
        read(tmp_path / "a.json", Model)
