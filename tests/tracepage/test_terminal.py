"""How wide lines are, and progress on a terminal and in a file."""

import io
import os
import sys
import threading

from tracepage import terminal

import pytest


@pytest.fixture
def no_size(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.usefixtures("no_size")
@pytest.mark.parametrize("columns, expected", [(None, 120), (300, 120), (100, 100), (40, 80)])
def test_lines_are_as_wide_as_the_terminal_within_bounds(monkeypatch, columns, expected):
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    assert terminal.width() == expected
    lines = terminal.wrapped("word " * 100, 4).splitlines()
    assert max(map(len, lines)) <= expected and all(
        line.startswith("    word") for line in lines[1:]
    )
    assert terminal.wrapped("x" * 200) == "x" * 200, "a word, such as a path, is whole"


def shown(stream, *texts: str) -> None:
    line = terminal.Line(stream)
    for text in texts:
        line.show(text)
    line.end()
    line.end()


def test_progress_in_a_file_is_a_line_each():
    stream = io.StringIO()
    shown(stream, "step 1", "step 2")
    assert stream.getvalue() == "step 1\nstep 2\n"


@pytest.mark.parametrize(
    "kind, expected",
    [("xterm", "\x1b[Kstep 1\r\x1b[Kstep 2 is\r\n"), ("dumb", "step 1\nstep 2 is long\n")],
)
def test_progress_on_a_terminal_overwrites_one_line_that_does_not_wrap(monkeypatch, kind, expected):
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "10")
    ours, theirs = os.openpty()
    with open(theirs, "w", closefd=True) as stream:
        shown(stream, "step 1", "step 2 is long")
        stream.write("end")
        stream.flush()
        found = b""
        while not found.endswith(b"end"):
            found += os.read(ours, 1000)
    assert found.decode().replace("\r\n", "\n") == f"{expected}end"
    os.close(ours)


def test_long_work_reports_again_and_again_until_it_ends(monkeypatch):
    enough, before = threading.Event(), {*threading.enumerate()}

    class Log(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().count("\n") == 3:
                enough.set()

    monkeypatch.setattr(terminal, "SECONDS", 1e-3)
    monkeypatch.setattr(sys, "stderr", Log())
    with terminal.progress("building"):
        assert enough.wait(300)
    assert {*threading.enumerate()} <= before, "nothing is left that could report"
    assert all(
        line.startswith("building: ") and line.endswith(" s")
        for line in sys.stderr.getvalue().splitlines()
    )


def test_quick_work_is_silent_and_its_error_passes(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SECONDS", 3600)
    before = {*threading.enumerate()}
    with pytest.raises(KeyError), terminal.progress("building"):
        raise KeyError
    assert capsys.readouterr() == ("", "") and {*threading.enumerate()} <= before
