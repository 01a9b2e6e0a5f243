"""Stage 3: "The slide says it is fast."

"Attention is right again, so I measured the phases of a step with Python's best clock. Forward,
backward and optimizer together take a fraction of what your harness calls a step, and that sum is
on my slide now. What does the harness count that is not training?"

    python v3_stage3_fake_timing.py --preset medium --batch-size 64 --use-amp --num-steps 20
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import time

from common import timing
from stages import Parts, Stage


class PythonClock(timing.Clock):
    """Reads the time where it is asked to."""

    def mark(self) -> int:
        self.marks.append(time.perf_counter())
        return len(self.marks) - 1

    def milliseconds(self, start: int, stop: int) -> float:
        return (self.marks[stop] - self.marks[start]) * 1e3


STAGE = Stage(__doc__, __file__, Parts(phase_clock=PythonClock))

# A handout ends here.
from common import device as devices

import torch


def caveat(device: torch.device) -> str | None:
    if devices.is_gpu(device):
        return None
    return (
        "a call returns when its work is done, so the phases add up with any clock; "
        "the effect needs a GPU"
    )


class SynchronizedClock(PythonClock):
    """The same, when the device has done what it was given."""

    def mark(self) -> int:
        devices.synchronize(self.device)
        return super().mark()


STAGE.fix = Parts(phase_clock=SynchronizedClock)
STAGE.caveat = caveat

if __name__ == "__main__":
    STAGE.main()
