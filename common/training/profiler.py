"""Profiles the last steps of a run, and writes their trace.

`torch.profiler` records the operators of a few steps with their shapes, and writes a Chrome trace
(`trace_<stamp>.json`, for https://ui.perfetto.dev or chrome://tracing).
`common.training.profile_files` makes the other files from it. Of several processes each writes its
trace (`trace_rank1_<stamp>.json`).

Of captured steps there is also a trace of one eager step (`eager_trace_<stamp>.json`), from which
the kernels of the graph get their spans and operators.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from common import device as devices
from common import ranks, spans
from common.options import RunOptions
from tracepage.errors import RunError
from tracepage.files import writable_folder

import torch

# PyTorch 2.12 and later print two lines of noise per profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def exported(profile: torch.profiler.profile, path: Path) -> None:
    """Writes the Chrome trace into a hidden folder beside `path`, and renames it when it is whole.

    RunError: it could not be written.
    """
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as hidden,
        tempfile.TemporaryDirectory() as plain,
    ):
        # The profiler puts the file's name into the JSON as it is, so it must be a plain one.
        link = Path(plain, "traces")
        link.symlink_to(Path(hidden).resolve())
        name = f"trace{''.join(path.suffixes)}"
        profile.export_chrome_trace(f"{link}/{name}")
        trace = Path(hidden, name)
        # Where a disk is full, the profiler leaves a part under another name, without an error.
        if not trace.exists():
            raise RunError(f"the trace could not be written into {path.parent}: is the disk full?")
        trace.replace(path)


def trace(step: Callable[[], object], path: Path, active: int = 1, shapes: bool = True) -> None:
    """Writes the Chrome trace of `active` calls of a step, after a warm-up of one; packed if the
    path ends in .gz.
    """
    with torch.profiler.profile(
        record_shapes=shapes,
        acc_events=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda profile: exported(profile, path),
    ) as profile:
        for _ in range(1 + active):
            step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            profile.step()


class Profiler:
    """Profiles the last steps of a run: call `step` after each, `stop` after the last, `export`
    when the record is written.
    """

    def __init__(self, options: RunOptions, device: torch.device) -> None:
        self.options = options
        self.folder = writable_folder(options.profile_dir, "--profile-dir")
        # In UTC the newest has the last name.
        stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}_{os.getpid()}"
        self.stamp = ranks.gathered(stamp)[0]
        self.rank = ranks.here().rank
        rank = f"rank{self.rank}_" if self.rank else ""
        self.trace_path = self.folder / f"trace_{rank}{self.stamp}.json"
        self.profile_path = self.folder / f"profile_{self.stamp}.json"
        self.eager_path = self.folder / f"eager_trace_{rank}{self.stamp}.json"  # of a captured step
        self.active = min(options.profile_steps, max(1, (options.num_steps - 1) // 2))
        self.warmup = 1 if options.num_steps > self.active else 0
        self.running = False
        self.recorded = False
        activities = [torch.profiler.ProfilerActivity.CPU]
        if devices.is_gpu(device):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=options.num_steps - self.active - self.warmup,
                warmup=self.warmup,
                active=self.active,
                repeat=1,
            ),
            on_trace_ready=self._recorded,
            record_shapes=True,
            profile_memory=options.profile_memory,
            with_stack=options.profile_with_stack,
            with_flops=options.profile_with_flops,
            # Otherwise PyTorch 2.11 warns that one cycle forgets the one before.
            acc_events=True,
        )

    def start(self) -> None:
        """Before the first step."""
        self.profile.start()
        self.running = True
        spans.recording = self.slow_steps(1) > 0

    def record_eager(self, step: Callable[[], object]) -> None:
        """Profiles one eager step: kernels of its captured form get their spans from it."""
        spans.recording = True
        trace(step, self.eager_path)
        spans.recording = False

    def step(self, finished: int) -> None:
        """After step number `finished` (from 1)."""
        self.profile.step()
        spans.recording = self.slow_steps(finished + 1) > 0

    def stop(self) -> None:
        """After the last step, or where a signal ends the run; a second call does nothing."""
        if self.running:
            spans.recording = False
            self.running = False
            self.profile.stop()

    def _recorded(self, profile: torch.profiler.profile) -> None:
        # `export` writes it: that takes seconds, in which the steps are not yet in any file.
        self.recorded = True

    def slow_steps(self, finished: int) -> int:
        """How many of the finished steps ran under the profiler, its own warm-up included."""
        return max(0, finished - (self.options.num_steps - self.active - self.warmup))

    def export(self) -> None:
        """Writes the Chrome trace, after `stop`; returns when every process has."""
        exported(self.profile, self.trace_path)
        ranks.wait_for_all()

    def operator_flops(self) -> dict[str, float]:
        """FLOPs of the profiled steps by operator; of Python's calls, which with_stack adds to the
        events, there are none.
        """
        counted: Counter[str] = Counter()
        for event in self.profile.events():
            counted[event.name] += event.flops or 0
        return {**+counted}
