"""The report on levers: a column for each preset, and every spread."""

from common.analysis.reports import levers


def test_a_preset_is_a_column_and_a_way_is_a_row():
    us = {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 9}
    rows = [{"lever": "x", "way": "a", "preset": preset, "us": us} for preset in ("tiny", "")]
    medians, spread = (section.items[0].content for section in levers.report(rows).sections[-2:])
    assert (list(medians.header), medians.rows) == (["lever", "way", "tiny, us", "own sizes, us"], [["x", "a", 2.0, 2.0]])
    assert spread.rows[0] == ["tiny", "x", "a", 2.0, 1.0, 3.0]
