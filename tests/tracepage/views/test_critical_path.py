"""The critical path of steps whose path, gaps and overlaps are known."""

from tests import branched_traces
from tracepage.readers import graph_replays
from tracepage.records import step_profile
from tracepage.views import critical_path

import pandas
import pytest


def measured(*kernels: tuple[int, float, float]) -> pandas.DataFrame:
    """A step of kernels with these streams, starts and ends."""
    rows = [(stream, 1000 * (1000 + start), 1000 * (end - start)) for stream, start, end in kernels]
    return critical_path.measure(
        pandas.DataFrame(rows, columns=["stream", "start_ns", "duration_ns"])
    )


def path(kernels: pandas.DataFrame) -> list[tuple[float, float, float]]:
    """Start, own time and gap in us of each kernel on the path."""
    times = kernels.loc[kernels.on_path, ["start_ns", "path_ns", "gap_ns"]] / 1e3
    return list(times.itertuples(index=False, name=None))


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def profile(request, tmp_path):
    return branched_traces.write(tmp_path, request.param)


def loaded(profile):
    content = step_profile.read(profile)
    return content, graph_replays.load(profile.with_name(content["trace"]))


def test_a_step_with_two_branches(profile):
    step = critical_path.step(loaded(profile)[1])
    assert path(step) == [(0, 10, 0), (11, 19, 1), (33, 10, 3)]
    assert list(step.name[step.on_path]) == [branched_traces.PRODUCT, "nvjet_weight", "_adamw"]
    assert critical_path.summary(step) == pytest.approx(
        {
            "from the first start to the last end, us": 43,
            "kernels, copies and fills": 6,
            "streams": 2,
            "on the critical path": 3,
            "their time, us": 39,
            "gaps between them, us": 4,
            "no kernel runs, us": 4,
            "busy, %": 100 * 39 / 43,
            "sum of all kernels, us": 59,
        }
    )


def test_kernels_that_overlap_on_one_stream_and_on_two():
    """A second kernel 2 us after the first, while a long one runs; of 0.5 us of overlap in a
    stream, the first has the time.
    """
    step = measured((7, 0, 10), (8, 1, 13), (7, 12, 40))
    assert path(step) == [(0, 10, 0), (12, 28, 2)]
    numbers = critical_path.summary(step)
    assert (numbers["from the first start to the last end, us"], numbers["no kernel runs, us"]) == (
        40,
        0,
    )

    assert path(measured((7, 0, 10), (7, 9.5, 20))) == [(0, 10, 0), (9.5, 10, 0)]
    assert path(measured((7, 0, 10), (8, 9.5, 20))) == [(9.5, 10.5, 0)]

    assert len(path(measured((7, 0, 10), (8, 9.999, 20)))) == 2


@pytest.mark.parametrize(
    "kernels", [[(7, 3, 9)], [(7, 0, 4), (7, 6, 9), (7, 9, 30), (7, 30.5, 31)]]
)
def test_on_one_stream_every_kernel_is_on_the_path(kernels):
    step = measured(*kernels)
    assert step.on_path.all()
    numbers = critical_path.summary(step)
    window = numbers["from the first start to the last end, us"]
    assert (
        (step.path_ns.sum() + step.gap_ns.sum()) / 1e3
        == pytest.approx(window)
        == kernels[-1][2] - kernels[0][1]
    )
    assert step.gap_ns.sum() / 1e3 == pytest.approx(numbers["no kernel runs, us"])


def test_the_step_is_the_median_one(tmp_path):
    profile = branched_traces.write(tmp_path, scales=(1.0, 4.0, 2.0))
    assert critical_path.step(loaded(profile)[1]).end_ns.max() == 86_000


def test_times_are_of_all_launches_of_a_kernel_those_on_the_path_first(profile):
    step = critical_path.step(loaded(profile)[1])
    header, rows = critical_path.kernel_table(step)
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert [row[0] for row in rows] == [
        "nvjet_weight",
        branched_traces.PRODUCT,
        "_adamw",
        "_swiglu",
        "_rms_norm_forward",
        "Memcpy",
    ]
    swiglu, adamw = found["_swiglu"], found["_adamw"]
    assert (swiglu["span"], swiglu["phase"], swiglu["us"], swiglu["us on path"]) == (
        "mlp",
        "forward",
        10,
        0,
    )
    assert (adamw["on path"], adamw["gaps us"]) == (1, 3)
    step.loc[step.name == "_swiglu", "duration_ns"] = 50_000
    assert [row[0] for row in critical_path.kernel_table(step)[1][2:4]] == ["_adamw", "_swiglu"]


def test_a_profile_of_a_cpu_shows_its_operators(cpu_profile):
    text = critical_path.critical_path_report(
        cpu_profile, step_profile.read(cpu_profile)
    ).terminal()
    assert (
        "No kernel of a GPU ran in this profile, so it has no critical path." in text
        and "aten::mm" in text
    )
