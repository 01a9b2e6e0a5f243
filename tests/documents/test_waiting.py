"""The table of the lesson "Why does the GPU wait?"."""

from documents import waiting
from tests.conftest import ROOT
from tracepage.files import write_json

RESULTS = ROOT / "results/h200/why_it_waits"


def test_a_row_has_both_bounds_of_the_page_beside_the_measured_steps(tmp_path):
    case = {"case": 5, "fault": "norms", "ms": 99.0, "ms_without": 88.0}
    write_json(tmp_path / "record.json", {"cases": [case]})
    table = waiting.cases(tmp_path / "record.json", RESULTS / "case_5.json.gz")
    row = table.splitlines()[-1]
    assert row == "| 5 | norms | synchronization | 31.8 | 3.5 | 25.1 to 28.3 | 99 | 88 |"
