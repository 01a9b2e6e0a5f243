"""Your checks catch each liar and let the honest harness pass, on a simulated GPU whose seconds are the same on every machine."""

import functools
import itertools
from pathlib import Path

from common import exercises

import pytest
import torch
from harnesses import LIARS, Claim, SimulatedGPU, honest, hurried, multiply, remembered, timed, update_all

RETURNED = {"waits_and_warms_up": 1001, "reads_memory": 2, "lasts": 1.15, "repeats": 11.34, "computes": 2}  # for its liar
checks = exercises.load(Path(__file__).parent, "checks")


def evidence(name, harness, **options) -> float:
    numbers = itertools.count()
    return getattr(checks, name)(harness, lambda: SimulatedGPU(next(numbers)), **options)


@pytest.mark.parametrize("name", LIARS)
def test_problem1_catches_the_liar_and_lets_the_honest_harness_pass(name):
    liar, launch = LIARS[name]
    assert evidence(name, liar) == pytest.approx(RETURNED[name], rel=0.005)
    assert evidence(name, functools.partial(honest, launch=launch)) == pytest.approx(0 if name == "repeats" else 1, abs=0.005)


def first_launch_counts(start) -> Claim:
    return Claim(timed(start(), update_all))


def nobody_waits(start) -> Claim:
    device = start()
    timed(device, update_all)
    return hurried(lambda: device)


@pytest.mark.parametrize("harness", [first_launch_counts, nobody_waits])
def test_problem1_sees_either_fault_of_the_hurried_harness(harness):
    assert evidence("waits_and_warms_up", harness) > 1.1


def test_problem1_lasts_as_long_as_it_is_told():
    assert evidence("lasts", LIARS["lasts"][0], seconds=0.5) == pytest.approx(1, abs=0.005)


class Captured(SimulatedGPU):
    """Its products read the memory that x had at first."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.read = torch.ones(())

    def product(self) -> float:
        self._launch(1e-3)
        return 3 * float(self.read)


def test_problem1_changes_x_in_place():
    assert checks.computes(functools.partial(honest, launch=multiply, processes=1), Captured) == pytest.approx(1)


def half_replayed(start) -> Claim:
    device = start()
    return Claim(1, result=(remembered(device) + device.product()) / 2)


def test_problem1_computes_a_ratio():
    assert evidence("computes", half_replayed) == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([1, 2, 3], [4, 5, 6], 0.1),
        ([4.1, 4.3], [4.2], 1),
        ([1, 2, 4], [3, 5, 6], 0.2),
        ([2, 2], [2, 2], 1),
        ([9], [1, 2, 3], 0.25),
        ([5, 6, 7], [1, 2], 0.1),
        ([1, 1], [2, 2], 1 / 3),
        ([1, 1, 2], [3, 3], 0.2),
    ],
)
def test_problem2_share_of_the_splits(a, b, expected):
    assert checks.p_value(a, b) == pytest.approx(expected)
