"""Progress of long work: one line after each interval, and none from work that is quick."""

import threading

from common import progress

import pytest


def test_long_work_reports_again_and_again_until_it_ends(monkeypatch):
    enough, lines, before = threading.Event(), [], threading.active_count()

    def note(line: str, **_) -> None:
        lines.append(line)
        if len(lines) == 3:
            enough.set()

    monkeypatch.setattr(progress, "SECONDS", 1e-3)
    monkeypatch.setattr(progress, "print", note, raising=False)
    with progress.progress("building"):
        assert enough.wait(60)
    assert threading.active_count() == before, "nothing is left that could report"
    assert all(line.startswith("building: ") and line.endswith(" s") for line in lines)


def test_quick_work_is_silent_and_its_error_passes(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 3600)
    before = threading.active_count()
    with pytest.raises(KeyError), progress.progress("building"):
        raise KeyError
    assert capsys.readouterr() == ("", "") and threading.active_count() == before
