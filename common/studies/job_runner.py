"""Runs the jobs of a study in turn, or side by side on GPUs of their own, and writes the study's file after each.

A job measures a cell of the study once. The repeats of a cell are jobs of their own. A job answers with its outcome:

    status, reason         "ok", or how it failed and why, in one line
    device, environment    if the job came far enough to describe them
    other keys             what the study stores in the cell

A cell that has failed keeps its status and its reason, and is not repeated. The other cells go on.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from common import ROOT, files
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.errors import UsageError
from common.progress import progress
from common.records.fields import Attempted

import torch

KILLED = "killed by the system (SIGKILL), as it does when memory runs out"

Outcome = dict[str, Any]


class Job(NamedTuple):
    """A measurement of a cell."""

    cell: Attempted
    name: str  # shown while the job runs
    run: Callable[[str | None], Outcome]  # takes the GPUs of the job, as `visible_gpus` names them


Batch = tuple[list[Job], list[str | None]]  # jobs, and the GPUs of as many of them as run at the same time


def run_all(
    batches: list[Batch],
    measured: dict[str, Any],
    path: Path,
    received: list[int],
    store: Callable[[Any, Outcome], None],
    line: Callable[[Any], str],
) -> int:
    """Runs the batches one after the other; after each job it prints a line and writes `measured`, which holds the cells.

    Args:
        received: the signals that have arrived. After one, no job starts.
        store: puts an "ok" outcome into its cell.
        line: how a cell's last job ended.

    Returns:
        The exit code: 0, 1 if a cell failed other than by memory, 128 + n if stopped by signal n.
    """

    def run(job: Job, place: str | None) -> Outcome | None:
        return None if received or _has_failed(job.cell) else job.run(place)

    every, number = [job for jobs, _ in batches for job in jobs], 0
    for jobs, places in batches:
        with side_by_side(jobs, run, places) as outcomes:
            for job in jobs:
                number += 1
                with progress(job.name):
                    outcome = next(outcomes)
                stopped = received and outcome and outcome["status"] != "ok"  # Ctrl-C reaches the job too
                if not outcome or stopped or _has_failed(job.cell):
                    continue
                job.cell["status"], job.cell["reason"] = outcome["status"], outcome["reason"]
                measured |= {key: outcome[key] for key in ("device", "environment") if key in outcome}
                if outcome["status"] == "ok":
                    store(job.cell, outcome)
                files.write_measurement(path, measured, "--output-dir")
                print(f"{number:4d} of {len(every)}  {line(job.cell)}", flush=True)
    measured["status"] = "interrupted" if received else "completed"
    files.write_measurement(path, measured, "--output-dir")
    failed = any(job.cell["status"] in ("failed", "timed out") for job in every)
    return 128 + received[0] if received else int(failed)


def _has_failed(cell: Attempted) -> bool:
    return cell["status"] not in ("ok", "not run")


@contextmanager
def side_by_side(jobs: list[Any], run: Callable[[Any, str | None], Any], places: list[str | None]) -> Iterator[Iterator[Any]]:
    """The results of run(job, place) in the order of the jobs, of which as many run at once as there are places.

    With one place, jobs run in this thread, where signals arrive. At the end, whatever its reason, no further job starts.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for place in places:
        free.put(place)

    def run_in_a_free_place(job: Any) -> Any:
        place = free.get()
        try:
            return run(job, place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            yield iter((pool.map if len(places) > 1 else map)(run_in_a_free_place, jobs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def visible_variable() -> str:
    """The variable that names the GPUs: CUDA_VISIBLE_DEVICES, unless HIP's own is set, which HIP reads in its place."""
    own = "HIP_VISIBLE_DEVICES"
    return own if torch.version.hip and own in os.environ else "CUDA_VISIBLE_DEVICES"


def visible_gpus(count: int) -> list[str | None]:
    """The value of `visible_variable` for each of `count` GPUs; None for one, which keeps it. UsageError: there are fewer."""
    if count == 1:
        return [None]
    present = torch.cuda.device_count()
    if count > present:
        raise UsageError(f"--gpus {count}: GPUs here: {present}")
    named = os.environ.get(visible_variable())
    return [*(named.split(",") if named else map(str, range(present)))][:count]


def environment(gpus: str | None) -> dict[str, str]:
    """The environment of a job's processes, which find this repository whatever their folder is."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths} | ({visible_variable(): gpus} if gpus else {})


def not_measured(report: Report, measured: Mapping[str, Any], facts: list[tuple[str, str]]) -> None:
    """The report's section on what a study could not measure, if there is anything."""
    if measured["status"] == "interrupted":
        facts = [("The run was interrupted", "cells are missing, or lack repeats"), *facts]
    if facts:
        report.section("Not measured")
        report.facts(facts)


def timed_out(seconds: float | None) -> Outcome:
    return {"status": "timed out", "reason": f"not done after {seconds} s"}


def reason(cell: Attempted) -> str:
    """Why a cell was not measured, in one line."""
    return f"{cell['status']}: {cell['reason']}" if cell["reason"] else cell["status"]


def last_run(cell: Any) -> str:
    """The outcome of a cell's last job, for the terminal."""
    if cell["status"] != "ok":
        return reason(cell)
    run = cell["runs"][-1]
    return f"{tables.format_time(run['step_ms']['median']):>9} a step {run['peak_mib']:10,.0f} MiB"
