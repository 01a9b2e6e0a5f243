"""Which files are the traces of one job's ranks."""

import os

from tests.rank_files import write_late, write_rank
from tests.small_traces import gpu_trace
from tracepage.errors import UsageError
from tracepage.files import write_json
from tracepage.readers import rank_traces

import pytest


def test_a_folder_and_its_files_give_the_traces_by_rank(tmp_path):
    paths = write_late(tmp_path)
    expected = dict(enumerate(paths)), []
    assert rank_traces.find([tmp_path]) == rank_traces.find(paths[::-1]) == expected


def test_the_rank_is_in_the_trace_before_the_name(tmp_path):
    path = write_rank(tmp_path, 3, [("", 0, 9)], world_size=8)
    assert rank_traces.rank_of(path.rename(tmp_path / "rank_5.json")) == (3, 8)
    assert rank_traces.rank_of(write_rank(tmp_path, 4, [("", 0, 9)])) == (4, 0)


def test_one_trace_or_two_of_one_rank_are_no_job(tmp_path):
    path = write_rank(tmp_path, 0, [("", 0, 9)])
    (tmp_path / "other").mkdir()
    other = write_rank(tmp_path / "other", 0, [("", 0, 9)])
    nameless = tmp_path / "trace.json"
    write_json(nameless, gpu_trace())
    for paths in ([path], [path, other], [path, nameless], [path, tmp_path], [tmp_path]):
        assert rank_traces.find(paths) == ({}, [])


def test_the_newest_file_of_a_rank_counts(tmp_path):
    for age in (2, 1):
        folder = tmp_path / str(age)
        folder.mkdir()
        for path in write_late(folder):
            os.utime(path, (1e9 - age, 1e9 - age))
    traces, notes = rank_traces.find([tmp_path])
    assert {path.parent.name for path in traces.values()} == {"1"}
    assert notes == ["Not read: 2 other traces in the folder."]


def test_files_that_are_no_job_are_refused(tmp_path):
    paths = write_late(tmp_path)
    with pytest.raises(UsageError, match=r"trace_rank0.json is no other rank of one job \(rank: 0"):
        rank_traces.find([*paths, paths[0]])
    other = write_rank(tmp_path, 2, [("", 0, 9)], world_size=4)
    with pytest.raises(UsageError, match="jobs with different numbers of ranks: .*of 2, .*of 4"):
        rank_traces.find([*paths, other])
