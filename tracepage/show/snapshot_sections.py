"""The memory of a snapshot: the peak and who holds it, the pools, and what is alive at the end."""

from collections.abc import Sequence
from typing import Any

from tracepage.readers.allocator_history import BEFORE, Snapshot
from tracepage.show import plots, tables
from tracepage.show.plots import MIB
from tracepage.show.report import Report
from tracepage.terminal import counted

import pandas
from matplotlib.figure import Figure

TOP = 25  # rows
# What people do about the largest holder, by its category.
CURES = {
    "forward": " (a smaller batch needs less, and so do activations that are computed again, with "
    "`torch.utils.checkpoint`)",
    "optimizer": " (shard these states, or keep them in fewer bits)",
    BEFORE: " (usually parameters and optimizer states: shard them, or keep them in fewer bits)",
}
ABOUT = (
    "The category follows from the stack. Most of a backward pass has none, because PyTorch runs "
    "it in a thread without Python. What was allocated before the history are the blocks that "
    "existed when recording began, usually parameters and optimizer states, without their stacks. "
    "The allocator counts blocks, which can be larger than requests."
)


def _allocated(snapshot: Snapshot) -> pandas.Series:
    """Bytes after each event."""
    return snapshot.events.bytes.cumsum()


def peak(snapshot: Snapshot) -> tuple[int, int, pandas.DataFrame]:
    """Bytes at the peak, bytes that the pools hold then, and a row for each place that holds some
    of it: place, category, bytes, the largest first.
    """
    events = snapshot.events
    allocated = _allocated(snapshot)
    last = int(allocated.argmax())
    before = events[: last + 1]
    held = before.groupby(["place", "category"], as_index=False).bytes.sum()
    held = held[held.bytes > 0].sort_values("bytes", ascending=False, kind="stable")
    return int(allocated[last]), int(before.reserved.sum()), held


def verdict(snapshot: Snapshot) -> str:
    """The peak, its largest holder and the cure, the pools, and the last request that failed."""
    size, reserved, held = peak(snapshot)
    sentence = f"The peak is {_mib(size)}"
    if len(held):
        row = held.iloc[0]
        sentence += f", of which `{row.place}` holds {100 * row.bytes / (size or 1):.0f} %"
        sentence += CURES.get(row.category, "")
    unused = f"{100 * (1 - size / reserved):.0f} %" if reserved else "0 %"
    sentence += f". The pools then reserve {_mib(reserved)}, {unused} of it not allocated."
    if snapshot.failures:
        request, device_free, place = snapshot.failures[-1]
        at_end = int(_allocated(snapshot).iloc[-1])
        pools = int(snapshot.events.reserved.sum())
        sentence = (
            f"Out of memory: `{place}` asked for {_mib(request)}, and the device had "
            f"{_mib(device_free)} free. At the end {_mib(at_end)} are allocated, and the pools "
            f"hold {_mib(pools - at_end)} more in pieces. {sentence}"
        )
    return sentence


def _mib(size: float) -> str:
    return f"{tables.format_number(size / MIB)} MiB"


def page_of(snapshots: Sequence[Snapshot]) -> Report:
    """The page of a snapshot, or of two."""
    first, *others = snapshots
    page = Report(" and ".join(snapshot.path.name for snapshot in snapshots))
    if not others:
        page.verdict(verdict(first))
        _add_sections(page, first)
        return page
    page.section("Snapshots")
    facts = enumerate(map(verdict, snapshots), 1)
    page.facts([(str(number), sentence) for number, sentence in facts])
    page.section("At the peak")
    names = ("MiB in 1", "MiB in 2")
    columns = [peak(snapshot)[2].groupby("place").bytes.sum() / MIB for snapshot in snapshots]
    both = pandas.concat(columns, axis=1, keys=names).fillna(0.0)
    both["change"] = both[names[1]] - both[names[0]]
    both = both.sort_values("change", key=abs, ascending=False, kind="stable")
    rows = [[place, *map(float, row)] for place, *row in both.itertuples()]
    page.table(["allocated at", *names, "change MiB"], rows, code=["allocated at"], top=TOP)
    for number, snapshot in enumerate(snapshots, 1):
        page.section(f"Memory over time, {number}")
        _add_figure(page, snapshot, f"memory{number}")
    return page


def _add_sections(page: Report, snapshot: Snapshot) -> None:
    size, _, held = peak(snapshot)
    page.section("Memory over time")
    _add_figure(page, snapshot, "memory")
    page.text(ABOUT, *snapshot.notes)
    page.section("At the peak")
    rows = []
    for place, category, held_bytes in held.itertuples(index=False):
        rows.append([place, category, held_bytes / MIB, 100 * held_bytes / (size or 1)])
    header = ["allocated at", "category", "MiB", "% of peak"]
    page.table(header, rows, code=["allocated at"], top=TOP)
    page.section("At the end")
    reserved = int(snapshot.events.reserved.sum())
    free = sum(snapshot.free)
    facts = [
        ("allocated", _mib(snapshot.alive.bytes.sum())),
        ("reserved", _mib(reserved)),
        ("free in the pools", f"{_mib(free)} in {counted(len(snapshot.free), 'block')}"),
        ("largest free block", _mib(max(snapshot.free, default=0))),
    ]
    page.facts(facts)
    sums = snapshot.alive.groupby("place").bytes.agg(["size", "sum"])
    sums = sums.sort_values("sum", ascending=False, kind="stable")
    rows = [[place, blocks, total / MIB] for place, blocks, total in sums.itertuples()]
    title = "Blocks that are alive"
    page.table(["allocated at", "blocks", "MiB"], rows, title, code=["allocated at"], top=TOP)


def _add_figure(page: Report, snapshot: Snapshot, stem: str) -> None:
    about = "Allocated memory by category, and the memory that the pools reserve"
    page.figure(lambda: _draw(snapshot), stem, about)


def _draw(snapshot: Snapshot) -> Figure:
    events = snapshot.events
    changes = events.pivot(columns="category", values="bytes")
    alive = changes.reindex(columns=[BEFORE, *plots.CATEGORIES]).fillna(0).cumsum()
    times = (events.time_us - events.time_us.iloc[0]) / 1e6
    figure = plots.memory(times, alive, _allocated(snapshot), events.reserved.cumsum())
    unit = "s" if snapshot.timed else "millions of entries"
    figure.axes[0].set_xlabel(f"{unit} since the history began")
    return figure


def content(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """The content of the JSON file, with sizes in bytes."""
    runs = []
    for snapshot in snapshots:
        size, reserved, held = peak(snapshot)
        runs.append(
            {
                "file": str(snapshot.path),
                "device": snapshot.device,
                "verdict": verdict(snapshot),
                "peak_bytes": size,
                "reserved_bytes": reserved,
                "at_peak": held.to_dict("records"),
                "alive": snapshot.alive.groupby("place").bytes.sum().to_dict(),
                "before_bytes": int(snapshot.events.bytes.iloc[0]),
                "notes": snapshot.notes,
            }
        )
    return runs[0] if len(runs) == 1 else {"runs": runs}
