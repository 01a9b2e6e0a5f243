"""A file is read once, whatever its page shows of it."""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from tests import branched_traces
from tests.kernel_files import FIXTURES
from tests.small_traces import gpu_trace, write_profile
from tracepage import files
from tracepage.readers import load_kernels
from tracepage.readers.source import CALL_COLUMNS
from tracepage.views import run_page

import pytest


@pytest.fixture
def whole_reads(monkeypatch):
    """How often each file was read to its end, by name."""
    reads: Counter[str] = Counter()
    opened = files.opened

    @contextmanager
    def counting(path: Path):
        with opened(path) as file:
            at_end = []

            class Counted:
                def __getattr__(self, name):
                    return getattr(file, name)

                def read(self, size=-1):
                    content = file.read(size)
                    at_end.append(size < 0 or (size > 0 and not content))
                    return content

                def readinto(self, buffer):
                    size = file.readinto(buffer)
                    at_end.append(size == 0)
                    return size

            yield Counted()
            if any(at_end):
                reads[path.name] += 1

    monkeypatch.setattr(files, "opened", counting)
    return reads


def make_page(*paths: Path) -> None:
    run_page.make_page([run_page.load_page_source(path) for path in paths]).html()


def test_a_page_of_two_traces_reads_each_once(tmp_path, whole_reads):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(gpu_trace()))
    make_page(tmp_path / "a.json", tmp_path / "b.json")
    assert whole_reads == {"a.json": 1, "b.json": 1}


def test_a_page_of_two_profiles_reads_each_and_its_traces_once(tmp_path, whole_reads, gpu_profile):
    captured = branched_traces.write(tmp_path / "captured", captured=True)
    write_profile(tmp_path / "profile_3.json", tmp_path / "trace_2.json")
    whole_reads.clear()
    make_page(gpu_profile, captured)
    once = ("profile_2.json", "trace_2.json", "profile_1.json", "trace_1.json")
    assert whole_reads == dict.fromkeys((*once, "eager_trace_1.json"), 1)


def test_a_page_of_another_programs_trace_or_of_counters_reads_it_once(tmp_path, whole_reads):
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "other.json").write_text(json.dumps([event]))
    make_page(tmp_path / "other.json")
    make_page(FIXTURES / "ncu_raw.csv")
    # The text of a CSV file is also searched for what recognizes it.
    assert whole_reads == {"other.json": 1, "ncu_raw.csv": 2}


@pytest.mark.parametrize("name", ["trace", "profile", "other", "counters"])
def test_every_source_has_the_columns_of_the_table_of_calls(tmp_path, gpu_profile, name):
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "other.json").write_text(json.dumps([event]))
    paths = {
        "trace": tmp_path / "trace_2.json",
        "profile": gpu_profile,
        "other": tmp_path / "other.json",
        "counters": FIXTURES / "ncu_raw.csv",
    }
    table = load_kernels.load(paths[name], any_trace=True).table
    assert set(CALL_COLUMNS) <= set(table.columns) and len(table)
    assert table.duration_ns.sum() >= 5000
