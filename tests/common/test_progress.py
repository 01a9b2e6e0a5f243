"""Progress of long work: one line after each interval, and none from work that is quick."""

import io
import sys
import threading

from common import progress

import pytest


def test_long_work_reports_again_and_again_until_it_ends(monkeypatch):
    enough, before = threading.Event(), {*threading.enumerate()}

    class Log(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().count("\n") == 3:
                enough.set()

    monkeypatch.setattr(progress, "SECONDS", 1e-3)
    monkeypatch.setattr(sys, "stderr", Log())
    with progress.progress("building"):
        assert enough.wait(300)
    assert {*threading.enumerate()} <= before, "nothing is left that could report"
    assert all(line.startswith("building: ") and line.endswith(" s") for line in sys.stderr.getvalue().splitlines())


def test_quick_work_is_silent_and_its_error_passes(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 3600)
    before = {*threading.enumerate()}
    with pytest.raises(KeyError), progress.progress("building"):
        raise KeyError
    assert capsys.readouterr() == ("", "") and {*threading.enumerate()} <= before


@pytest.mark.parametrize("seconds, shown", [(0.4, "0 s"), (46.2, "46 s"), (99.4, "99 s"), (100, "2 min"), (7200, "120 min")])
def test_a_duration_has_the_unit_in_which_it_is_read(seconds, shown):
    assert progress.duration(seconds) == shown
