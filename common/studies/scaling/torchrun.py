"""Runs a command as a torchrun job on this host, and says how the job ended."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.options import Options
from common.ranks import Form
from common.studies import job_runner


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(Options):
    """The options of a scaling study, whose flags scaling_study.py explains."""

    models: list[str]
    forms: list[Form]
    processes: list[int]
    global_batch_size: int
    num_steps: int
    profile_steps: int
    repeats: int
    fill_gpus: bool
    timeout: int
    link_gbs: float | None
    link_us: float | None
    keep_traces: bool
    output_dir: Path


def run(
    processes: int, command: list[str], options: ScalingOptions, folder: Path, gpus: str | None = None
) -> tuple[int | None, str]:
    """The exit code of a torchrun job, None if it took too long, and what it printed. Whatever ends this, the job ends too."""
    threads = str(max(1, (os.cpu_count() or 1) // max(options.processes)))  # alike in all cells
    environment = {"OMP_NUM_THREADS": threads} | job_runner.environment(gpus)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        launcher + command, cwd=folder, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            said, _ = job.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            job.terminate()  # torchrun then ends its processes; it has ended but for a time-out or a second signal
    return job.returncode, said


def ending(code: int | None, said: str, options: ScalingOptions) -> job_runner.Outcome:
    """The status of a job that did not succeed, and the reason in one line."""
    if code is None:
        return job_runner.timed_out(options.timeout)
    lines = said.strip().splitlines() or [f"exit code {code}"]
    reason = next((line.partition("error: ")[2] for line in lines if line.startswith("error: ")), lines[-1])[:500]
    killed = re.search(r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)", said)
    if killed and not reason.startswith("out of memory"):
        reason = job_runner.KILLED
    full = killed or "out of memory" in reason
    return {"status": "out of memory" if full else "failed", "reason": reason}
