"""Your checks catch each liar and let the honest harness pass, on a simulated GPU."""

from pathlib import Path

import exercise_tools as exercises

import pytest
from harnesses import LIARS, Claim, SimulatedGPU, hurried, short, timed, update_all

RETURNED = {  # for the liar of each check
    "waits_and_warms_up": 1001,
    "reads_memory": 2,
    "lasts": 1.15,
    "repeats": 11.34,
    "computes": 2,
}
checks = exercises.load(Path(__file__).parent, "checks")


@pytest.mark.parametrize("name", LIARS)
def test_problem1_catches_the_liar_and_lets_the_honest_harness_pass(name):
    liar, holds = LIARS[name]
    check = getattr(checks, name)
    assert check(liar, SimulatedGPU()) == pytest.approx(RETURNED[name], rel=0.005)
    assert check(holds, SimulatedGPU()) == pytest.approx(0 if name == "repeats" else 1, abs=0.005)


def first_launch_counts(device) -> Claim:
    return Claim(timed(device, update_all))


def nobody_waits(device) -> Claim:
    timed(device, update_all)
    return hurried(device)


@pytest.mark.parametrize("harness", [first_launch_counts, nobody_waits])
def test_problem1_sees_either_fault_of_the_hurried_harness(harness):
    assert checks.waits_and_warms_up(harness, SimulatedGPU()) > 1.1


def test_problem1_lasts_as_long_as_it_is_told():
    assert checks.lasts(short, SimulatedGPU(), seconds=0.5) == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([1, 2, 3], [4, 5, 6], 0.1),
        ([4.1, 4.3], [4.2], 1),
        ([1, 2, 4], [3, 5, 6], 0.2),
        ([9], [1, 2, 3], 0.25),
        ([5, 6, 7], [1, 2], 0.1),
        ([1, 1], [2, 2], 1 / 3),
    ],
)
def test_problem2_share_of_the_splits(a, b, expected):
    assert checks.p_value(a, b) == pytest.approx(expected)
