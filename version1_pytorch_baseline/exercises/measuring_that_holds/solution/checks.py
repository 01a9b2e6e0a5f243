"""Five checks of harnesses and a permutation test: one way to do it."""

from collections.abc import Sequence
from itertools import combinations

from harnesses import Device, Harness, multiply, timed, update_all


def waits_and_warms_up(harness: Harness, device: Device) -> float:
    """The larger of two ratios: first / second claim, and seconds a launch / second claim.

    The seconds a launch are those of the second call, by `device.now()`.
    """
    first = harness(device).seconds
    launches = device.launches
    begin = device.now()
    second = harness(device).seconds
    device.synchronize()
    outside = (device.now() - begin) / (device.launches - launches)
    return max(first / second, outside / second)


def reads_memory(harness: Harness, device: Device) -> float:
    """Seconds of an update of all buffers / the claim.

    Warm up before you time: a real GPU captures its first update.
    """
    claim = harness(device).seconds
    timed(device, update_all)
    return timed(device, update_all) / claim


def lasts(harness: Harness, device: Device, seconds: float = 10) -> float:
    """Seconds of a product after `seconds` of products / the claim."""
    claim = harness(device).seconds
    end = device.now() + seconds
    while device.now() < end:
        last = timed(device, multiply)
    return last / claim


def repeats(harness: Harness, device: Device, processes: int = 10) -> float:
    """Half the range of the claims of several processes / the error that the first one claims."""
    claims = [harness(process) for process in device.processes(processes)]
    seconds = [claim.seconds for claim in claims]
    return (max(seconds) - min(seconds)) / 2 / claims[0].error


def computes(harness: Harness, device: Device) -> float:
    """Twice the result of a first call, after which `device.x` doubles / that of a second call."""
    before = harness(device).result
    device.x *= 2
    return 2 * before / harness(device).result


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all splits of a + b into two such groups whose means differ as much or more."""
    both = [*a, *b]
    differences = []
    for chosen in combinations(both, len(a)):  # the first are a and b themselves
        other = (sum(both) - sum(chosen)) / len(b)
        differences.append(abs(sum(chosen) / len(a) - other))
    return sum(difference > differences[0] - 1e-9 for difference in differences) / len(differences)
