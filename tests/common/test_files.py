"""Result files: their form on disk, and what they hold when they are read again."""

import gzip
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Literal

from common import files
from common.analysis.profiles import chrome_trace, load_kernels
from common.errors import RunError, UsageError
from common.files import Amount, read, read_json, writable_file, write_json, write_measurement, write_text
from tests.conftest import room_for

import pytest
from pydantic import PositiveInt
from typing_extensions import TypedDict

CONTENT = {
    "schema": "x/1", "device": {"name": "X", "threads": 2}, "empty": [], "missing": None, "all": [0.1] * 300,
    "rows": [{"kernel": "forward", "blocks": [64, 32]}, {"kernel": "backward", "text": "a" * 300}],
    "wide": {"one": "b" * 80, "two": {"three": "c" * 120, "pairs": [[1, 2], [3, 4]]}},
}  # fmt: skip


def test_what_was_written_is_read_again_with_the_mode_that_the_user_wants(tmp_path):
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_json(tmp_path / name, CONTENT)
        assert read_json(tmp_path / name) == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.gz", "b.json.gz"]
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert (tmp_path / "a.json.gz").read_bytes()[4:8] == bytes(4), "gzip's time of writing"
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "plain").write_text(f"[{2**63 - 1}, {-(2**63)}, 0]")
    assert read_json(tmp_path / "plain") == [2**63 - 1, -(2**63), 0], "integers of 64 bits stay exact"


def test_a_row_is_a_line_and_a_list_of_numbers_too(tmp_path):
    write_json(tmp_path / "result.json", CONTENT)
    lines = (tmp_path / "result.json").read_text().splitlines()
    assert f' "all": {json.dumps(CONTENT["all"])},' in lines
    assert ' "device": {"name": "X", "threads": 2},' in lines
    assert all(any(line.strip().rstrip(",") == json.dumps(row) for line in lines) for row in [*CONTENT["rows"], [1, 2], [3, 4]])


def test_content_that_cannot_be_written_and_a_full_disk_leave_the_folder_as_it_was(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "result.json", {"path": tmp_path})
    assert not list(tmp_path.iterdir())

    (tmp_path / "result.json").write_text("of an earlier run")
    with room_for(200), pytest.raises(OSError, match="File too large"):
        write_json(tmp_path / "result.json", CONTENT)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier run"]


def test_links_are_followed_and_a_loop_of_them_is_refused_before_any_work(tmp_path):
    for name, target in (("link", "record"), ("new", "far/record"), ("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.json").symlink_to(tmp_path / f"{target}.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink() and read_json(tmp_path / "record.json") == {"a": 1}
    write_measurement(writable_file(tmp_path / "new.json", "--output"), {"a": 1}, "--output")
    assert read_json(tmp_path / "far/record.json") == {"a": 1}, "a folder that was not there yet"
    with pytest.raises(UsageError, match=r"--metrics-out: cannot write .*a.json: Too many levels of symbolic links"):
        writable_file(tmp_path / "a.json", "--metrics-out")


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    path = tmp_path / f"{'ü' * 125}.json"  # 255 bytes
    write_json(path, CONTENT)
    assert read_json(path) == CONTENT and list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_has_a_name_that_no_one_can_foresee(tmp_path, monkeypatch):
    """Else a link of that name, which another user put there, would send what is written elsewhere."""
    names = {files.temporary_name(tmp_path / "result.json") for _ in range(100)}
    assert len(names) == 100 and all(name.parent == tmp_path for name in names)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    monkeypatch.setattr(files, "temporary_name", lambda _: tmp_path / "link")
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "result.json", CONTENT)
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "result.json").exists()


# ------------------------------------------------------------------------------------------------------------- pipes


@pytest.mark.parametrize("read", [read_json, load_kernels.load])
def test_a_pipe_that_no_process_writes_to_is_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UsageError, match="pipe.json is a pipe that no process writes to: give a file"):
        read(tmp_path / "pipe.json")


def test_a_pipe_is_read_to_its_end_even_if_its_writer_is_slow(tmp_path):
    """It is longer than a pipe holds, and the writer waits before the first byte, as unzip or a download does."""
    reader, writer = os.pipe()
    program = "import sys, time; time.sleep(0.2); sys.stdout.write('[' + '1, ' * 50_000 + '1]')"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=writer)
    os.close(writer)
    try:
        assert read_json(Path(f"/dev/fd/{reader}")) == [1] * 50_001
    finally:
        os.close(reader)
        process.wait()


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(device):
    with pytest.raises(UsageError, match=f"{device} is a device: give a file"):
        read_json(Path(device))


def test_a_file_without_an_end_is_refused():
    try:
        os.close(os.open("/proc/kmsg", os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"the kernel's messages cannot be read here: {error}")
    with pytest.raises(UsageError, match="/proc/kmsg has no end: give a file that has"):
        read_json(Path("/proc/kmsg"))


@pytest.mark.parametrize("read", [read_json, chrome_trace.load], ids=lambda read: read.__module__)
def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path, monkeypatch, read):
    monkeypatch.setattr(files, "UNPACKED", 2**16, raising=False)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b"{}, " * 10**6 + b"{}]}"))
    with pytest.raises(UsageError, match="a.json.gz expands to more than 100 times its size: unpack it, if that is meant to be"):
        read(tmp_path / "a.json.gz")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"[" + b"1, " * 20_000 + b"1]"))
    assert read_json(tmp_path / "a.json.gz") == [1] * 20_001, "below UNPACKED"
    whole = [secrets.token_hex(2**16)]
    write_json(tmp_path / "a.json.gz", whole)
    assert read_json(tmp_path / "a.json.gz") == whole, "larger, but twice the file"


class Full:
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("full", [False, True], ids=["printed", "printed on stderr"])
def test_a_measurement_that_cannot_be_written_is_printed(tmp_path, capsys, monkeypatch, full):
    if full:
        monkeypatch.setattr("sys.stdout", Full())
    (tmp_path / "out.json").mkdir()
    with pytest.raises(RunError, match=r"cannot write .*out.json \(--output\): Is a directory; it was printed instead"):
        write_measurement(tmp_path / "out.json", CONTENT, "--output")
    printed = capsys.readouterr()
    assert json.loads(printed.err if full else printed.out) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


DEEP = "a.json is damaged: its lists or objects are nested too deep"
REFUSED = [
    ("", "a.json is empty"), ("{", "a.json is not JSON or is cut off: .* at line 1"), ("[]", "not a file of schema x/1"),
    ('{"schema": "y"}', r"not a file of schema x/1 \(found: y\)"),
    ("[" * 100_000, DEEP), ('{"a": ' * 100_000, DEEP), ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", DEEP),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=lambda value: value[:20])
def test_what_is_no_result_is_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_json(tmp_path / "a.json", "x/1")


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


def test_text_that_utf8_cannot_hold_is_written(tmp_path):
    write_text(tmp_path / "a.txt", "a\ud800b")
    assert (tmp_path / "a.txt").read_text() == "a?b"


def test_a_message_is_one_line_however_long_and_odd_a_name_is():
    for kind in (UsageError, RunError):
        message = str(kind(f"begin \x1b[31m\n{'x' * 100_000} end"))
        assert message.isprintable() and message.startswith("begin  [31m xx") and message.endswith("x end")
        assert len(message) < 3000
