"""The bars and the table of ranks: shares of one step for all, and waits of a rank's own."""

from tests.conftest import cells
from tests.rank_files import write_late, write_rank
from tracepage.causes import rank_waits
from tracepage.readers import rank_traces
from tracepage.show import rank_sections
from tracepage.show.report import Report

import pytest


def page_of(*paths) -> Report:
    traces, notes = rank_traces.find(paths)
    ranks = {number: rank_waits.read_rank(path) for number, path in traces.items()}
    page = Report("ranks")
    rank_sections.add_sections(page, rank_waits.compare(ranks, notes))
    return page


def test_the_bars_of_all_ranks_have_the_scale_of_the_longest_step(tmp_path, monkeypatch):
    bars = []
    monkeypatch.setattr(Report, "bar", lambda page, parts: bars.append(parts))
    write_rank(tmp_path, 0, [("gemm", 0, 300), ("", 300, 400)])
    write_rank(tmp_path, 1, [("gemm", 0, 700), ("", 700, 800)])
    page_of(tmp_path)
    computing = [dict((name, share) for name, share, _ in bar)["computing"] for bar in bars]
    assert computing == pytest.approx([100 * 300 / 800, 100 * 700 / 800])


def test_waits_for_ranks_are_no_waits_of_a_ranks_own(tmp_path):
    page = page_of(*write_late(tmp_path, in_loader=True))
    section = page.markdown().split("## Ranks")[1].split("## ")[0]
    header, *rows = cells(section)
    late, own = (header.index(name) for name in ("waits for ranks", "other waits"))
    assert [(float(row[late]), round(float(row[own]), 2)) for row in rows] == [(0.1, 0), (0, 0.1)]
    assert rows[1][-1] == "input"
