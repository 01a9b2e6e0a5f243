"""The longest kernels of any profiler's file, also where names hold commas."""

import csv
import io
import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT
from tests.version3_triton.performance_debugging.conftest import FOLDER

SCRIPT = FOLDER / "top_kernels.py"
HEADER = ["Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage", "MinNs", "MaxNs", "StdDev"]


def statistics(path: Path) -> Path:
    """As rocprofv3 quotes them: 40 kernels, every other one with commas in its name, the later the longer."""
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC)
    table.writerow(HEADER)
    for i in range(1, 41):
        name = f"void kernel_{i:02}<float, 4, {i}>(int, float*)" if i % 2 else f"kernel_{i:02}"
        table.writerow([name, 2, 20000 * i, 10000 * i, 100 / 40, 1000, 9000, 1.0])
    path.write_text(text.getvalue())
    return path


def test_it_lists_those_that_sort_loses(execute, tmp_path):
    path = statistics(tmp_path / "1_kernel_stats.csv")
    shown = execute(SCRIPT, path, "--top", "20", "--csv-out", "all.csv").out
    top = [f"kernel_{i:02}" for i in range(40, 20, -1)]
    places = [shown.index(name) for name in top]
    assert places == sorted(places) and "kernel_20" not in shown
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert len(rows) == 40 and rows[1]["name"] == "void kernel_39<float, 4, 39>(int, float*)"
    assert rows[1]["total_ns"] == "780000.0"
    by_column = subprocess.run(["sort", "-t", ",", "-k4", "-nr", str(path)], capture_output=True, text=True).stdout.splitlines()
    assert sum(name in "".join(by_column[:20]) for name in top) <= 15


def test_of_a_folder_it_takes_the_statistics(execute, tmp_path):
    (tmp_path / "out/host").mkdir(parents=True)
    shutil.copy(ROOT / "tests/fixtures/kernels/new_kernel_trace.csv", tmp_path / "out/host/1_kernel_trace.csv")
    statistics(tmp_path / "out/host/1_kernel_stats.csv")
    assert "kernel_40" in execute(SCRIPT, "out").out
