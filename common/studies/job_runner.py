"""Runs the jobs of a study in turn, and writes the study's file after each; `in_a_process` does a job in a process of its own.

A job measures a cell of the study once. The repeats of a cell are jobs of their own. A job answers with its outcome:

    status, reason         "ok", or how it failed and why, in one line
    device, environment    if the job came far enough to describe them
    other keys             what the study stores in the cell

A cell that has failed keeps its status and its reason, and is not repeated. The other cells go on. After a signal no job starts.
"""

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import device as devices
from common import files, signals
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.errors import RunError
from common.terminal import progress

KILLED = "killed by the system (SIGKILL), as it does when memory runs out"
FAILED = ("failed", "timed out")  # otherwise than by memory

Outcome = dict[str, Any]


class Job(NamedTuple):
    """A measurement of a cell."""

    cell: Any
    name: str  # shown while the job runs
    run: Callable[[], Outcome]
    store: Callable[[Outcome], object]  # puts an "ok" outcome into the cell


def run_all(jobs: list[Job], measured: dict[str, Any], path: Path, line: Callable[[Any], str]) -> int:
    """Runs the jobs; after each it prints `line` of its cell and writes `measured`, which holds the cells.

    Returns the exit code: 0, 1 if a cell failed otherwise than by memory, 128 + n if stopped by signal n.
    """
    with signals.deferred() as received:
        for number, job in enumerate(jobs, 1):
            if received or job.cell["status"] not in ("ok", "not run"):
                continue
            with progress(job.name):
                outcome = job.run()
            if received and outcome["status"] != "ok":  # Ctrl-C reaches the job too
                continue
            job.cell["status"], job.cell["reason"] = outcome["status"], outcome["reason"]
            measured |= {key: outcome[key] for key in ("device", "environment") if key in outcome}
            if outcome["status"] == "ok":
                job.store(outcome)
            files.write_measurement(path, measured, "--output-dir")
            print(f"{number:4d} of {len(jobs)}  {line(job.cell)}", flush=True)
        measured["status"] = "interrupted" if received else "completed"
        files.write_measurement(path, measured, "--output-dir")
    return 128 + received[0] if received else int(any(job.cell["status"] in FAILED for job in jobs))


def in_a_process(work: Callable[[], Any], device: str, timeout: int | None = None) -> Outcome:
    """The outcome of the work in a new process; `found` is what the work returned."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(work, device, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(timeout) else timed_out(timeout)
    except EOFError:  # the process ended without an outcome
        process.join()
    finally:
        process.kill()
        process.join()
    if process.exitcode == -signal.SIGKILL:
        return {"status": "out of memory", "reason": KILLED}
    return {"status": "failed", "reason": f"exit code {process.exitcode}"}


def _do(work: Callable[[], Any], device: str, sender: Any) -> None:
    """Does the work in its own process, and sends its outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the study, which ends this process
    outcome: Outcome = {"device": devices.describe(devices.select(device)), "environment": devices.environment()}
    try:
        outcome |= {"status": "ok", "reason": None, "found": work()}
    except Exception as error:  # a cell that fails is a result; the others go on
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome |= {"status": "out of memory" if devices.is_out_of_memory(error) else "failed", "reason": said[:500]}
    sender.send(outcome)


def timed_out(seconds: float | None) -> Outcome:
    return {"status": "timed out", "reason": f"not done after {seconds} s"}


def reason(cell: Mapping[str, Any]) -> str:
    """Why a cell was not measured, in one line."""
    return f"{cell['status']}: {cell['reason']}" if cell["reason"] else cell["status"]


def medians(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Medians over the runs of a cell that is ok: ms of a step, their p20 and p80, and the peak memory; and how many runs."""
    step = {name: median(run["step_ms"][name] for run in cell["runs"]) for name in ("median", "p20", "p80")}
    peak = median(run["peak_mib"] for run in cell["runs"])
    return {"ms": step["median"], "p20": step["p20"], "p80": step["p80"], "repeats": len(cell["runs"]), "peak_mib": peak}


def require_measured(cells: Sequence[Mapping[str, Any]], place: Callable[[Any], str]) -> None:
    """Raises RunError, with the reason of the first cell, if no cell was measured."""
    if all(cell["status"] != "ok" for cell in cells):
        first = f"; the first: {place(cells[0])}, {reason(cells[0])}" if cells else ""
        raise RunError(f"nothing was measured{first}")


def last_run(cell: Mapping[str, Any]) -> str:
    """The outcome of a cell's last job, for the terminal."""
    if cell["status"] != "ok":
        return reason(cell)
    run = cell["runs"][-1]
    return f"{tables.format_time(run['step_ms']['median']):>9} a step {run['peak_mib']:10,.0f} MiB"


def not_measured(report: Report, measured: Mapping[str, Any], facts: list[tuple[str, str]]) -> None:
    """The report's section on what a study could not measure, if there is anything."""
    if measured["status"] == "interrupted":
        facts = [("The run was interrupted", "cells are missing, or lack repeats"), *facts]
    if facts:
        report.section("Not measured")
        report.facts(facts)
