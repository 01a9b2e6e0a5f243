"""The page of a memory snapshot, and of two."""

import json

from tests.snapshot_files import FORWARD, MIB, content, entry, step_content, write_snapshot
from tracepage.readers import allocator_history
from tracepage.show import snapshot_sections

import pytest


@pytest.fixture
def load(tmp_path):
    def load(snapshot: dict, name: str = "a.pickle") -> allocator_history.Snapshot:
        return allocator_history.read(write_snapshot(tmp_path / name, snapshot))

    return load


def table(page, title: str) -> list:
    [section] = [section for section in page.sections if section.title == title]
    [item] = [item for item in section.items if item.kind == "table"]
    return list(item.content.rows)


def test_the_peak_has_its_holders_and_the_pools(load):
    page = snapshot_sections.page_of([load(step_content())])
    assert page.first_sentence() == (
        "The peak is 70 MiB, of which `models/llama.py:71 forward` holds 57 % (a smaller batch needs "
        "less, and so do activations that are computed again, with `torch.utils.checkpoint`). "
        "The pools then reserve 100 MiB, 30 % of it not allocated."
    )
    assert table(page, "At the peak") == [
        ["models/llama.py:71 forward", "forward", 40, pytest.approx(57.14, abs=0.01)],
        ["no stack", "no stack", 20, pytest.approx(28.57, abs=0.01)],
        ["before the history", "before the history", 10, pytest.approx(14.29, abs=0.01)],
    ]
    assert table(page, "At the end") == [["before the history", 1, 10], ["me/t.py:8 main", 1, 5]]
    assert "free in the pools: 85 MiB in 1 block" in page.markdown()
    assert "<svg" in page.html()


def test_out_of_memory_comes_first(load):
    failed = {"action": "oom", "size": 700 * MIB, "device_free": MIB, "frames": FORWARD}
    held = entry("alloc", 1, 60 * MIB, FORWARD)
    sentence = snapshot_sections.verdict(load(content(held, failed, alive=[(60 * MIB, FORWARD)])))
    assert sentence.startswith(
        "Out of memory: `models/llama.py:71 forward` asked for 700 MiB, and the device had 1 MiB "
        "free. At the end 60 MiB are allocated, and the pools hold 40 MiB more in pieces."
    )


def test_two_snapshots_show_what_changed_at_the_peak(load):
    sides = [load(step_content(40), "a.pickle"), load(step_content(25), "b.pickle")]
    page = snapshot_sections.page_of(sides)
    assert table(page, "At the peak")[0] == ["models/llama.py:71 forward", 40, 25, -15]
    assert page.html().count("<svg id") == 2
    runs = snapshot_sections.content(sides)["runs"]
    assert [run["peak_bytes"] / MIB for run in runs] == [70, 55]
    json.dumps(runs)


def test_a_long_history_keeps_its_peak_in_a_small_page(load):
    """More changes than points: the largest of each interval is drawn."""
    entries = []
    for number in range(5000):
        size = (9 if number == 3333 else 1) * MIB
        entries += [entry("alloc", 1, size, FORWARD), entry("free_requested", 1, size)]
    snapshot = load(content(*entries))
    assert snapshot_sections.peak(snapshot)[0] == 9 * MIB
    assert len(snapshot_sections.page_of([snapshot]).html()) < 400_000
