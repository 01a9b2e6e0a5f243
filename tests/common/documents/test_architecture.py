"""The table of devices' peaks."""

import re

from common.analysis.formulas.peaks import PEAKS
from common.documents import architecture


def test_each_device_of_the_table_is_listed_once():
    assert all(sum(bool(re.search(pattern, name)) for pattern in PEAKS) == 1 for name in architecture.DEVICES)


def test_a_format_that_a_device_lacks_is_an_empty_cell():
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (r.split("|") for r in architecture.balance().splitlines()[2:])
    }
    assert rows["H200 SXM"] == ["4.8", "67", "495", "989", "14", "103", "206"]
    assert rows["MI355X"][2] == rows["MI355X"][5] == ""
