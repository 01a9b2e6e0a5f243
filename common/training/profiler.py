"""Taking a profile of the last steps of a run, and writing it down.

`torch.profiler` records the operators of a few steps with their shapes. The Chrome trace is kept as it is
(`trace_<stamp>.json`, for https://ui.perfetto.dev or chrome://tracing), and read once into `profile_<stamp>.json`: one
row per operator, span and phase, with the record of the run. Everything in `common.analysis` reads that file.

Schema of profile_*.json, "tiny-llama-profile/1" (times in microseconds, summed over the profiled steps):

    run               the run's own record, schema "tiny-llama-run/1"
    trace             name of the trace beside it
    attention_only    whether only the attention span was kept
    profiled_steps    how many steps; step_us: the wall time of each
    operators         name, span, phase, input_shapes, input_types, calls, cpu_us, self_cpu_us, device_us,
                      self_device_us, allocated_bytes; largest self time first
    kernels           name, span, phase, calls, device_us (none on a CPU)
    device_busy_us    time in which at least one kernel ran
    launch            count of kernels, mean_delay_us from the launch call to the kernel's start
    memory_peak_bytes with --profile-memory: most bytes alive at once; on a CPU without what was there before the profile
"""

import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import device as devices
from common import spans
from common.analysis.profiles import chrome_trace, step_profile
from common.analysis.reports import memory_timeline, profile_summary
from common.files import writable_folder, write_json

import torch


class Profiler:
    """Profiles the last steps of a run: call `step` after each, `stop` after the last, `write` when the record is ready."""

    def __init__(self, options: Namespace, device: torch.device) -> None:
        self.options, self.folder = options, writable_folder(options.profile_dir, "--profile-dir")
        self.stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}_{os.getpid()}"  # UTC: the newest has the last name
        self.trace_path = self.folder / f"trace_{self.stamp}.json"
        self.profile_path = self.folder / f"profile_{self.stamp}.json"
        self.active = min(options.profile_steps, max(1, (options.num_steps - 1) // 2))
        self.warmup = 1 if options.num_steps > self.active else 0
        self.running = False
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.12 and later print two lines of noise per profile
        activities = [torch.profiler.ProfilerActivity.CPU]
        if devices.is_gpu(device):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=options.num_steps - self.active - self.warmup, warmup=self.warmup, active=self.active, repeat=1
            ),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(self.trace_path)),
            record_shapes=True,
            profile_memory=options.profile_memory,
            acc_events=True,  # or torch 2.11 warns that one cycle forgets the one before; there is only one
        )

    def start(self) -> None:
        """Before the first step."""
        self.profile.start()
        self.running = True
        spans.recording = self.slow_steps(1) > 0

    def step(self, finished: int) -> None:
        """After step number `finished` (from 1)."""
        self.profile.step()
        spans.recording = self.slow_steps(finished + 1) > 0

    def stop(self) -> None:
        """After the last step, or where a signal ends the run; a second call does nothing."""
        if self.running:
            spans.recording = self.running = False
            self.profile.stop()

    def slow_steps(self, finished: int) -> int:
        """How many of the finished steps ran while the profiler watched, its own warm-up included."""
        return max(0, finished - (self.options.num_steps - self.active - self.warmup))

    def write(self, record: dict[str, Any]) -> list[Path]:
        """Writes the profile, the event files and, where asked, the memory timeline; returns what was written.

        That is nothing where the run was stopped before its last steps, the ones that are profiled.
        """
        from common.analysis.reports import tensorboard

        if not self.trace_path.exists():
            return []
        trace = chrome_trace.load(self.trace_path)
        profile = {
            "schema": step_profile.SCHEMA, "run": record, "trace": self.trace_path.name,
            "attention_only": self.options.profile_attention_only,
            **chrome_trace.profile_tables(trace, self.options.profile_attention_only),
        }  # fmt: skip
        write_json(self.profile_path, profile)
        written = [self.profile_path, self.trace_path]
        if self.options.profile_memory:
            written.append(memory_timeline.write(self.folder / "memory_timeline.html", trace, profile))
        written.append(tensorboard.write(self.folder / f"run_{self.stamp}", profile, trace))
        if self.options.profile_operators:
            print(profile_summary.operators(profile, self.options.sort_by))
        return written
