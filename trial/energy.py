"""Which power does a model's step draw for 20 s, by the counter of energy and by NVML's power?

    python .trial_energy.py v4 --preset medium --out energy_v4.json

After `built` and 4 warm-up steps: 5 steps (as the record of 2026-11-27 took its milliseconds), 10 s of
load, then 20 s of timed steps. A thread notes when the counter changes, so power can be taken between
two of its updates, where its lateness does not count.
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from common import device as devices
from common import nvml, weights
from common.timing import benchmark
from studies import benchmark as study
from studies import version_files
from studies.peers import known_models

import pynvml
import torch

INSTANT, AVERAGE = 186, 185  # NVML_FI_DEV_POWER_INSTANT and _AVERAGE


def field(handle, number: int) -> float | None:
    try:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [number])[0]
        return value.value.uiVal / 1e3 if value.nvmlReturn == 0 else None
    except pynvml.NVMLError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--preset", default="medium")
    parser.add_argument("--load-seconds", type=float, default=10)
    parser.add_argument("--timed-seconds", type=float, default=20)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args()
    options = version_files.resolve(
        version_files.parser("").parse_args(["--preset", asked.preset, "--use-amp"])
    )
    model = known_models.find()[asked.model]
    device = devices.select("auto")
    with weights.drawn_on(device):
        prepared, _ = study.built(model, options)
    batch = version_files.random_batch(options, device)

    def step() -> None:
        prepared.step(batch)

    handle = nvml._gpu()
    nvml.joules()
    updates: list[tuple[float, float]] = []  # when the counter changed, and its joules
    powers: list[tuple[float, float, float | None, float | None, int]] = []
    ended = threading.Event()

    def watch() -> None:
        before = nvml.joules()
        due = 0.0
        while not ended.wait(0.002):
            now, joules = time.perf_counter(), nvml.joules()
            if joules != before:
                updates.append((now, joules))
                before = joules
            if now >= due:
                due = now + 0.1
                usage = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                powers.append((now, usage, field(handle, INSTANT), field(handle, AVERAGE), clock))

    five = benchmark(step, device, warmup=study.WARMUP, iterations=5)
    thread = threading.Thread(target=watch)
    thread.start()
    benchmark(step, device, 0, study.WARMUP, asked.load_seconds)
    start, before = time.perf_counter(), nvml.joules()
    times = benchmark(step, device, 0, 5, asked.timed_seconds)
    stop, after = time.perf_counter(), nvml.joules()
    ended.set()
    thread.join()

    inside = [(t, j) for t, j in updates if start + 1 <= t <= stop]
    (t0, j0), (t1, j1) = inside[0], inside[-1]
    windows = []
    for second in range(int(t1 - t0)):
        part = [(t, j) for t, j in inside if t0 + second <= t <= t0 + second + 1]
        if len(part) > 2:
            windows.append((part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]))
    intervals = [b[0] - a[0] for a, b in zip(inside, inside[1:])]
    sampled = [row for row in powers if start + 1 <= row[0] <= stop]
    joules = (after - before) / len(times)

    def mean_of(column: int) -> float | None:
        values = [row[column] for row in sampled if row[column] is not None]
        return round(mean(values), 1) if values else None

    found = {
        "model": asked.model,
        "preset": asked.preset,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": len(times),
        "seconds": stop - start,
        "limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "joules_a_step": joules,
        "first_five_median_ms": median(five),
        "median_ms": median(times),
        "mean_ms": mean(times),
        "w_by_first_five": joules / median(five) * 1e3,
        "w_by_median": joules / median(times) * 1e3,
        "w_by_mean": joules / mean(times) * 1e3,
        "w_region": (after - before) / (stop - start),
        "w_between_updates": (j1 - j0) / (t1 - t0),
        "w_seconds_min": min(windows),
        "w_seconds_max": max(windows),
        "w_power_usage": mean_of(1),
        "w_instant": mean_of(2),
        "w_instant_max": max((row[2] for row in sampled if row[2] is not None), default=None),
        "w_average": mean_of(3),
        "mhz": median(row[4] for row in sampled),
        "update_ms": median(intervals) * 1e3,
        "update_ms_max": max(intervals) * 1e3,
    }
    Path(asked.out).write_text(json.dumps(found, indent=1))
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps(shown), flush=True)


main()
