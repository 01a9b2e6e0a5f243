"""The table of all devices' peaks."""

import re

from common.analysis.formulas.peaks import PEAKS
from common.documents import architecture


def test_the_table_of_devices_has_each_one_that_is_listed():
    matches = [[pattern for pattern in PEAKS if re.search(pattern, name)] for name in architecture.DEVICES]
    assert sorted(first for first, *_ in matches) == sorted(PEAKS)


def test_a_format_that_a_device_lacks_is_an_empty_cell():
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (r.split("|") for r in architecture.balance().splitlines()[2:])
    }
    assert rows["H200 SXM"] == ["4.8", "67", "495", "989", "14", "103", "206"]
    assert rows["MI355X"][2] == rows["MI355X"][5] == ""
