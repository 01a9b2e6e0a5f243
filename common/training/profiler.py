"""Profiles the last steps of a run, and writes the profile.

`torch.profiler` records the operators of a few steps with their shapes. The Chrome trace is kept as it is
(`trace_<stamp>.json`, for https://ui.perfetto.dev or chrome://tracing), and read once into `profile_<stamp>.json`: one
row per operator, span and phase, with the record of the run. The reports in `common.analysis` read that file. Of several
processes each writes its trace (`trace_rank1_<stamp>.json`), and the first alone a profile, of its own.

Of captured steps there is also a trace of one eager step (`eager_trace_<stamp>.json`), from which the kernels of the graph get
their spans and operators.
"""

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from common import device as devices
from common import ranks, spans
from common.errors import RunError, UsageError
from common.files import writable_folder, write_json
from common.options import RunOptions
from common.records import step_profile
from common.records.run_record import RunRecord, TimedRun
from common.training import distributed, version_files

import torch


class Profiler:
    """Profiles the last steps of a run: call `step` after each, `stop` after the last, `write` when the record is written."""

    def __init__(self, options: RunOptions, device: torch.device) -> None:
        self.options, self.folder = options, writable_folder(options.profile_dir, "--profile-dir")
        stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}_{os.getpid()}"  # UTC: the newest has the last name
        self.stamp, self.rank = distributed.gathered(stamp)[0], ranks.here().rank
        rank = f"rank{self.rank}_" if self.rank else ""
        self.trace_path = self.folder / f"trace_{rank}{self.stamp}.json"
        self.profile_path = self.folder / f"profile_{self.stamp}.json"
        self.eager_path = self.folder / f"eager_trace_{rank}{self.stamp}.json"  # of a captured step
        self.active = min(options.profile_steps, max(1, (options.num_steps - 1) // 2))
        self.warmup = 1 if options.num_steps > self.active else 0
        self.running = self.recorded = False
        self.exported: list[Path] = []  # traces that PyTorch was told to write; it says nothing where it could not
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.12 and later print two lines of noise per profile
        self.activities = [torch.profiler.ProfilerActivity.CPU]
        if devices.is_gpu(device):
            self.activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=self.activities,
            schedule=torch.profiler.schedule(
                wait=options.num_steps - self.active - self.warmup, warmup=self.warmup, active=self.active, repeat=1
            ),
            on_trace_ready=self._recorded,
            record_shapes=True,
            profile_memory=options.profile_memory,
            with_stack=options.profile_with_stack,
            with_flops=options.profile_with_flops,
            acc_events=True,  # or torch 2.11 warns that one cycle forgets the one before; there is only one
        )

    def start(self) -> None:
        """Before the first step."""
        self.profile.start()
        self.running = True
        spans.recording = self.slow_steps(1) > 0

    def record_eager(self, run: Callable[[], object]) -> None:
        """Profiles one eager step, from which the kernels of its captured form get their spans and operators."""
        spans.recording = True
        with torch.profiler.profile(
            activities=self.activities, record_shapes=True, acc_events=True,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profile: self._export(profile, self.eager_path),
        ) as profile:  # fmt: skip
            for _ in range(2):
                run()
                torch.cuda.synchronize()
                profile.step()
        spans.recording = False

    def step(self, finished: int) -> None:
        """After step number `finished` (from 1)."""
        self.profile.step()
        spans.recording = self.slow_steps(finished + 1) > 0

    def stop(self) -> None:
        """After the last step, or where a signal ends the run; a second call does nothing."""
        if self.running:
            spans.recording = self.running = False
            self.profile.stop()

    def _recorded(self, profile: torch.profiler.profile) -> None:
        self.recorded = True  # `export` writes it: that takes seconds, in which the steps are not yet in any file

    def slow_steps(self, finished: int) -> int:
        """How many of the finished steps ran while the profiler watched, its own warm-up included."""
        return max(0, finished - (self.options.num_steps - self.active - self.warmup))

    def export(self) -> None:
        """Writes the Chrome trace, after `stop`."""
        self._export(self.profile, self.trace_path)

    def _export(self, profile: torch.profiler.profile, path: Path) -> None:
        self.exported.append(path)
        profile.export_chrome_trace(str(path))

    def write(self, record: RunRecord | TimedRun) -> list[Path]:
        """Writes the profile, the event files and the page; returns what was written, the page last.

        Nothing is written if the run was stopped before the profiled steps, which are its last ones. RunError: a file could not
        be written, those of PyTorch included, and no part of it is left.
        """
        if not self.recorded:
            return []
        try:
            return self._write(record)
        except OSError as error:
            shutil.rmtree(step_profile.events(self.profile_path, record), ignore_errors=True)
            raise RunError(f"the profile could not be written into {self.folder}: {error.strerror or error}") from error

    def _operator_flops(self) -> dict[str, float]:
        """FLOPs of the profiled steps by operator; of Python's calls, which with_stack adds to the events, there are none."""
        counted: Counter[str] = Counter()
        for event in self.profile.events():
            counted[event.name] += event.flops or 0
        return {**+counted}

    def _load(self, path: Path) -> Any:
        """Reads a trace that PyTorch was told to write; removes what it left where it could not write all of it."""
        from common.analysis.profiles import chrome_trace

        try:
            return chrome_trace.load(path)
        except UsageError as error:
            for left in (path, path.with_name(f"{path.name}.tmp")):
                left.unlink(missing_ok=True)
            raise RunError(f"PyTorch wrote no whole trace (is the disk full?): {error}") from error

    def _write(self, record: RunRecord | TimedRun) -> list[Path]:
        # pandas and matplotlib take a second and 60 MiB, which belong to no run that is not profiled
        from common.analysis.page import run_page
        from common.analysis.profiles import chrome_trace, graph_replays
        from common.analysis.reports import profile_summary, tensorboard

        flops = self._operator_flops() if self.options.profile_with_flops else None
        self.export()
        distributed.wait_for_all()  # until every process has written its trace
        if self.rank:
            return []
        trace = self._load(self.trace_path)
        if self.eager_path in self.exported:
            eager = self._load(self.eager_path)
            if lost := graph_replays.lost_kernels(trace, eager):
                print(f"note: {lost} (MACHINES.md: known on ROCm)", file=sys.stderr)
            trace = graph_replays.attribute(trace, eager)
        profile: step_profile.Profile = {
            "schema": "tiny-llama-profile/1", "run": cast(TimedRun, record), "trace": self.trace_path.name,
            "attention_only": self.options.profile_attention_only,
            **chrome_trace.profile_tables(trace, self.options.profile_attention_only),
        }  # fmt: skip
        if flops is not None:
            profile["operator_flops"] = flops
        write_json(self.profile_path, profile)
        written = [self.profile_path, *reversed(self.exported)]  # the eager trace came first
        written += sorted(self.folder.glob(f"trace_rank*_{self.stamp}.json"))  # of the other processes
        written.append(tensorboard.write(step_profile.events(self.profile_path, record), profile, trace))
        if self.options.profile_operators:
            print(profile_summary.operators(profile, self.options.sort_by).terminal())
        if profile["profiled_steps"] and profile["operators"]:
            written += run_page.of_run(self.profile_path, trace, version_files.kernel_costs).write(self.folder, "run", ("html",))
        return written
