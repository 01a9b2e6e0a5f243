"""Five checks of harnesses and a permutation test. ../README.md has the problems.

A check gets a harness and a new device, and returns a ratio: about 1 or less for a harness that
holds. `harness(device)` runs the harness; after that the device is warm. Replace each line that
names its problem.
"""

from collections.abc import Sequence
from itertools import combinations  # noqa: F401  (for your code)

from harnesses import Device, Harness, multiply, timed, update_all  # noqa: F401  (for your code)


def waits_and_warms_up(harness: Harness, device: Device) -> float:
    """The larger of: first / second claim, and the second call's seconds per launch by
    `device.now()` / second claim.

    `device.launches` before and after a call tells how many launches it made.
    """
    raise NotImplementedError("waits_and_warms_up: problem 1 of README.md")


def reads_memory(harness: Harness, device: Device) -> float:
    """Seconds of an update of all buffers / the claim. Warm up before you time: a real GPU captures
    its first update.
    """
    raise NotImplementedError("reads_memory: problem 1 of README.md")


def lasts(harness: Harness, device: Device, seconds: float = 10) -> float:
    """Seconds of a product after `seconds` of products / the claim."""
    raise NotImplementedError("lasts: problem 1 of README.md")


def repeats(harness: Harness, device: Device, processes: int = 10) -> float:
    """Half the range of the seconds that a harness claims in several processes / the error that it
    claims in the first.
    """
    raise NotImplementedError("repeats: problem 1 of README.md")


def computes(harness: Harness, device: Device) -> float:
    """The result that `device.x`, doubled after a first call, should give / the result that a
    second call claims.
    """
    raise NotImplementedError("computes: problem 1 of README.md")


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all ways to split a + b into two such groups in which the means differ by at
    least as much as here.

    Equal differences may differ in their last bits, so compare with a tolerance.
    """
    raise NotImplementedError("p_value: problem 2 of README.md")
