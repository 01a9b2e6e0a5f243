"""Memory over the profiled steps: the areas are the allocator's total, and the table is what is
alive at the peak.
"""

from dataclasses import replace

from tracepage.readers import chrome_trace
from tracepage.show import plots
from tracepage.show.report import Report
from tracepage.views import memory_timeline

import pandas
import pytest

MIB = 2**20


def trace(*events: tuple, device: str = "gpu") -> chrome_trace.Trace:
    """Of events (bytes, address, total, span, phase), 1 ms apart."""
    rows = [
        (1000.0 * i, size, address, total, device, *place)
        for i, (size, address, total, *place) in enumerate(events)
    ]
    empty = pandas.DataFrame()
    steps = pandas.DataFrame([(0.0, 1000.0 * len(events))], columns=chrome_trace.STEP_COLUMNS)
    return chrome_trace.Trace(
        empty, empty, pandas.DataFrame(rows, columns=chrome_trace.MEMORY_COLUMNS), steps
    )


GPU = trace(
    (4 * MIB, 1, 14 * MIB, "attention", "forward"),
    (2 * MIB, 2, 16 * MIB, "mlp", "forward"),
    (3 * MIB, 3, 19 * MIB, "mlp", "backward"),
    (-2 * MIB, 2, 17 * MIB, "mlp", "backward"),
    (-5 * MIB, 9, 12 * MIB, "other", "other"),  # from before the profile
    (1 * MIB, 4, 13 * MIB, "optimizer", "optimizer"),
)


def test_the_peak_has_the_live_allocations_and_the_areas_add_up_to_the_total():
    host = trace((99 * MIB, 1, 99 * MIB, "mlp", "forward"), device="cpu")
    both = replace(GPU, memory=pandas.concat([host.memory, GPU.memory]))
    peak, rows = memory_timeline.at_peak(memory_timeline.followed(both))
    assert peak == 19 * MIB and sum(size for *_, size in rows) == peak
    assert rows == [
        (memory_timeline.EARLIER, "", 10 * MIB),
        ("attention", "forward", 4 * MIB),
        ("mlp", "backward", 3 * MIB),
        ("mlp", "forward", 2 * MIB),
    ]

    last = {
        memory_timeline.EARLIER: 5 * MIB,
        "forward": 4 * MIB,
        "backward": 3 * MIB,
        "optimizer": MIB,
        "other": 0,
    }
    events = memory_timeline.followed(GPU)
    assert memory_timeline.alive_by_phase(events).iloc[-1].to_dict() == last

    (axes,) = memory_timeline.draw_areas(GPU, events).axes
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert max(tops) == pytest.approx(19) and [area.get_label() for area in axes.collections] == [
        memory_timeline.EARLIER,
        "forward",
        "backward",
        "optimizer",
    ]


def test_of_many_events_the_peak_is_still_drawn():
    climb = [(MIB, i, (i + 1) * MIB, "mlp", "forward") for i in range(3000)]
    climbed = trace(*climb, (-MIB, 0, 2999 * MIB, "mlp", "backward"))
    (axes,) = memory_timeline.draw_areas(climbed, memory_timeline.followed(climbed)).axes
    vertices = axes.collections[0].get_paths()[0].vertices
    assert vertices[:, 1].max() == 3000 and len(vertices) < 5 * plots.POINTS


def test_the_section_names_the_peak(cpu_trace):
    loaded, report = chrome_trace.load(cpu_trace), Report("")
    memory_timeline.add_peak(report, loaded)
    peak = loaded.memory.total_bytes.max() / MIB
    assert (
        f"Alive at the peak of {peak:.3g} MiB" in report.terminal()
        and "starts at zero" in report.terminal()
    )
