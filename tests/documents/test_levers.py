"""The tables of single operations."""

from documents import levers
from tracepage.files import write_json


def test_a_way_is_a_row_and_a_preset_a_column(tmp_path):
    path = tmp_path / "levers.json"
    timed = [
        ("tiny", "swiglu", "epilogue", 4.0),
        ("tiny", "rope", "epilogue", 5.0),
        ("large", "swiglu", "epilogue", 6.0),
    ]
    rows = []
    for preset, lever, way, us in timed:
        rows.append({"preset": preset, "lever": lever, "way": way, "us": {"median": us}})
    write_json(path, {"rows": rows})
    assert levers.epilogues(path).splitlines()[-1] == "| swiglu | epilogue | 4 |  |  | 6 |"
    assert levers.others(path).splitlines()[-1] == "| rope | epilogue | 5 |  |  |  |"
