"""The choice of two runs: the newest that can be compared, from folders that hold others too, one file in memory at a time."""

import weakref
from pathlib import Path

from common.analysis.comparisons import choose
from common.files import read_json, write_json
from tests.kernel_files import FIXTURES
from tests.records import record, save_profile


def saved(folder: Path, stamp: int, version: str = "v1", **changes) -> Path:
    save_profile(folder, record(version=version, date=f"2026-01-{stamp:02}", **changes), stamp)
    return folder / f"profile_{stamp}.json"


def test_the_newest_pair_that_can_be_compared_is_taken_and_what_is_passed_over_is_named(tmp_path):
    """The newest profile of a folder was taken and refused, though one that could be compared lay beside it."""
    before, after = tmp_path / "before", tmp_path / "after"
    for stamp in (1, 2):
        wanted = saved(before, stamp)
    other = saved(before, 3, training__batch_size=16)
    write_json(before / "profile_4.json", read_json(wanted) | {"attention_only": True})
    fused = saved(after, 2, "v2")
    paths, notes = choose.profiles([before], [after])
    assert paths == [wanted, fused]
    assert notes == [f"passed over {other}, which is newer than {wanted} but differs in batch size (16 and 8)"]


def test_where_none_can_be_compared_the_nearest_pair_is_taken_for_its_refusal(tmp_path):
    saved(tmp_path / "before", 2, training__batch_size=16, device__name="Another GPU")
    near = saved(tmp_path / "before", 1, training__batch_size=16)
    fused = saved(tmp_path / "after", 1, "v2")
    assert choose.profiles([tmp_path / "before"], [tmp_path / "after"])[0] == [near, fused]


def test_all_folders_of_a_side_count_and_missing_ones_do_not(tmp_path):
    older, newer = saved(tmp_path / "a", 1), saved(tmp_path / "b", 2)
    fused = saved(tmp_path / "after", 1, "v2")
    assert choose.profiles([tmp_path / "a", tmp_path / "b", tmp_path / "none"], [fused]) == ([newer, fused], [])
    assert choose.profiles([older], [tmp_path / "none", tmp_path / "after"]) == ([older, fused], [])


def test_damaged_profiles_and_those_without_a_step_are_passed_over(tmp_path):
    good, fused = saved(tmp_path / "before", 1), saved(tmp_path / "after", 1, "v2")
    (tmp_path / "before/profile_2.json").write_text('{"schema": "tiny-llama-profile/1"')
    save_profile(tmp_path / "before", record(date="2026-01-03"), 3, profiled_steps=0)
    assert choose.profiles([tmp_path / "before"], [tmp_path / "after"]) == ([good, fused], [])


def test_a_file_of_another_profiler_stands_for_itself(tmp_path):
    trace = FIXTURES / "new_kernel_trace.csv"
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2, training__batch_size=16)
    assert choose.profiles([tmp_path], [trace]) == ([newest, trace], [])
    assert choose.profiles([tmp_path / "none"], [trace]) == ([tmp_path / "none", trace], [])


def test_a_pair_is_as_old_as_the_older_of_its_runs(tmp_path):
    ours = [choose.read(saved(tmp_path / "a", stamp)) for stamp in (1, 5)]
    theirs = [choose.read(saved(tmp_path / "b", stamp, "v2")) for stamp in (2, 4)]
    choice = choose.choose(ours, theirs, choose.run_differences)
    assert [one.date for one in choice.pair] == ["2026-01-05", "2026-01-04"] and choice.differences == []
    assert choose.choose(ours, [], choose.run_differences) is None


def test_one_profile_is_held_at_a_time(tmp_path, monkeypatch):
    """Ten thousand profiles were held at once, 4 GB, and all pairs of them compared."""
    paths = [saved(tmp_path, stamp, training__batch_size=4 + 4 * (stamp % 2)) for stamp in range(1, 21)]
    alive: list[weakref.ref] = []

    class Content(dict):
        """Unlike a dict it can be referred to weakly."""

    def read(path: Path):
        assert not any(reference() is not None for reference in alive)
        content = Content(read_json(path))
        alive.append(weakref.ref(content))
        return content

    monkeypatch.setattr(choose.files, "read_json", read)
    found = choose.newest(filter(None, map(choose.read, paths)))
    assert [(one.date, one.conditions["batch size"]) for one in found] == [("2026-01-19", 8), ("2026-01-20", 4)]
    assert len(alive) == len(paths)
