"""Your checks catch each liar and let the honest harness pass, on a simulated GPU whose seconds are the same on every machine."""

import functools
import itertools
from pathlib import Path

from common import exercises

import pytest
from harnesses import LIARS, Claim, SimulatedGPU, honest, hurried, timed, update_all

checks = exercises.load(Path(__file__).parent, "checks")


def evidence(name, harness) -> float:
    numbers = itertools.count()
    return getattr(checks, name)(harness, lambda: SimulatedGPU(next(numbers)))


@pytest.mark.parametrize("name", LIARS)
def test_problem1_catches_the_liar_and_lets_the_honest_harness_pass(name):
    liar, launch = LIARS[name]
    assert evidence(name, liar) > 1.1
    assert evidence(name, functools.partial(honest, launch=launch)) < 1.05


def first_launch_counts(start) -> Claim:
    return Claim(timed(start(), update_all))


def nobody_waits(start) -> Claim:
    device = start()
    timed(device, update_all)
    return hurried(lambda: device)


@pytest.mark.parametrize("harness", [first_launch_counts, nobody_waits])
def test_problem1_sees_either_fault_of_the_hurried_harness(harness):
    assert evidence("waits_and_warms_up", harness) > 1.1


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([1, 2, 3], [4, 5, 6], 0.1),
        ([4.1, 4.3], [4.2], 1),
        ([1, 2, 4], [3, 5, 6], 0.2),
        ([2, 2], [2, 2], 1),
        ([9], [1, 2, 3], 0.25),
    ],
)
def test_problem2_share_of_the_splits(a, b, expected):
    assert checks.p_value(a, b) == pytest.approx(expected)
