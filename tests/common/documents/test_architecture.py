"""The table of devices' peaks."""

import re

from common.analysis.formulas.peaks import PEAKS
from common.documents import architecture


def test_each_device_of_the_table_is_listed_once():
    assert all(sum(bool(re.search(pattern, name)) for pattern in PEAKS) == 1 for name in architecture.DEVICES)
