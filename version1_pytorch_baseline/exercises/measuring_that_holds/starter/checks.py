"""Five checks of harnesses and a permutation test. ../README.md has the problems.

A check returns a ratio: about 1 or less for a harness that holds. Replace each line that names its problem.

- `harness(lambda: device)` runs a harness on your device, which is warm when you do so again.
- `device.launches` before and after such a call tells how many launches it made.
- `device.x *= 2` changes x in place. A captured graph would not see another x.
- Equal differences may differ in their last bits, so `p_value` needs a tolerance.
"""

# ruff: noqa: F401  (imports for your code)

from collections.abc import Callable, Sequence
from itertools import combinations

from harnesses import Claim, Start, multiply, timed, update_all

Harness = Callable[[Start], Claim]


def waits_and_warms_up(harness: Harness, start: Start) -> float:
    """The larger of: first / second claim, and the second call's seconds per launch by `device.now()` / second claim."""
    raise NotImplementedError("waits_and_warms_up: problem 1 of README.md")


def reads_memory(harness: Harness, start: Start) -> float:
    """Seconds of an update of all buffers / the claim. Warm up before you time: a real GPU captures its first update."""
    raise NotImplementedError("reads_memory: problem 1 of README.md")


def lasts(harness: Harness, start: Start, seconds: float = 10) -> float:
    """Seconds of a product after `seconds` of products / the claim."""
    raise NotImplementedError("lasts: problem 1 of README.md")


def repeats(harness: Harness, start: Start, processes: int = 10) -> float:
    """Half the range of the seconds that a harness claims in several processes / the error that it claims in the first."""
    raise NotImplementedError("repeats: problem 1 of README.md")


def computes(harness: Harness, start: Start) -> float:
    """The result that x, doubled in place, should give / the result that the harness then claims."""
    raise NotImplementedError("computes: problem 1 of README.md")


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all ways to split a + b into two such groups in which the means differ by at least as much as here."""
    raise NotImplementedError("p_value: problem 2 of README.md")
