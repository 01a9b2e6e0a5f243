"""The critical path of Version 4 in a run or a file, and what is refused."""

from tests import branched_traces
from tests.conftest import ROOT
from tests.records import profile, record
from tracepage.files import write_json

import pytest

pytest.importorskip("triton", reason="needs Triton")

V4 = ROOT / "version4_ultra_fused"
SCRIPT = V4 / "run_ultra_profiling.py"


def row(shown: str, name: str) -> list[str]:
    [line] = [line for line in shown.splitlines() if line.startswith(name)]
    return line.split()


def test_a_profile_is_shown(execute, tmp_path):
    path = branched_traces.write(
        tmp_path / "profiles", captured=True, version="v4", precision__compute="bf16"
    )
    shown = execute(SCRIPT, "--analyze-existing", path).out
    assert (
        row(shown, "on the critical path")[-1] == "3" and row(shown, "gaps between them")[-1] == "4"
    )
    assert row(shown, "_adamw")[-2:] == ["10", "3"]  # us on the path, and the gap before


def test_no_profile_and_one_without_its_trace_are_refused(refused, tmp_path):
    assert "profile_1.json does not exist" in refused(
        SCRIPT, "--analyze-existing", "profile_1.json"
    )

    write_json(tmp_path / "profile_1.json", profile(record(version="v4"), [{"name": "aten::mm"}]))
    assert "cannot read trace_1.json" in refused(SCRIPT, "--analyze-existing", "profile_1.json")
