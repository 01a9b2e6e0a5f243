"""How a command ends where its output is closed, or cannot show every letter."""

import io
import sys

from tracepage import command_line

import pytest


def test_letters_that_the_terminal_cannot_show_end_no_command(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert command_line.exit_code(lambda: print("caf\u00e9, caf\udce9")) == 0
    assert shown.getvalue() == b"caf?, caf?\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_ends_no_command(monkeypatch, capsys, closed):
    """Python then has None in its place, and `print` takes the other one."""
    monkeypatch.setattr(sys, closed, None)
    assert command_line.exit_code(lambda: print("x" * 9, file=getattr(sys, closed))) == 0
    getattr(sys, closed).close()
    assert "x" not in "".join(capsys.readouterr())
