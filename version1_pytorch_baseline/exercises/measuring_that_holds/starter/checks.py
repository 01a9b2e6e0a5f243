"""Five checks of harnesses and a permutation test. ../README.md has the problems.

A check gets a harness and a new device, and returns a ratio: about 1 or less for a harness that
holds. `harness(device)` runs the harness; after that the device is warm. Replace each line that
names its problem.
"""

from collections.abc import Sequence
from itertools import combinations  # noqa: F401  (for your code)

from harnesses import Device, Harness, multiply, timed, update_all  # noqa: F401  (for your code)


def waits_and_warms_up(harness: Harness, device: Device) -> float:
    """The larger of two ratios: first / second claim, and seconds a launch / second claim.

    The seconds a launch are those of the second call, by `device.now()`.
    `device.launches` before and after a call tells how many launches it made.
    """
    raise NotImplementedError("waits_and_warms_up: problem 1 of README.md")


def reads_memory(harness: Harness, device: Device) -> float:
    """Seconds of an update of all buffers / the claim.

    Warm up before you time: a real GPU captures its first update.
    """
    raise NotImplementedError("reads_memory: problem 1 of README.md")


def lasts(harness: Harness, device: Device, seconds: float = 10) -> float:
    """Seconds of a product after `seconds` of products / the claim."""
    raise NotImplementedError("lasts: problem 1 of README.md")


def repeats(harness: Harness, device: Device, processes: int = 10) -> float:
    """Half the range of the claims of several processes / the error that the first one claims."""
    raise NotImplementedError("repeats: problem 1 of README.md")


def computes(harness: Harness, device: Device) -> float:
    """Twice the result of a first call, after which `device.x` doubles / that of a second call."""
    raise NotImplementedError("computes: problem 1 of README.md")


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all splits of a + b into two such groups whose means differ as much or more.

    Equal differences may differ in their last bits, so compare with a tolerance.
    """
    raise NotImplementedError("p_value: problem 2 of README.md")
