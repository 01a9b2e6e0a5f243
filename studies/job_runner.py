"""Does a job of a study in a process of its own. The job answers with its outcome:

status, reason         "ok", or how it failed and why, in one line
device, environment    if the job came far enough to describe them
found                  what it measured, if it is ok
"""

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

from common import device as devices

KILLED = "killed by the system (SIGKILL), as it does when memory runs out"

Outcome = dict[str, Any]


def in_a_process(work: Callable[[], Any], device: str, timeout: int | None = None) -> Outcome:
    """The outcome of the work in a new process; `found` is what the work returned."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(work, device, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return {"status": "timed out", "reason": f"not done after {timeout} s"}
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
    # Ctrl-C reaches the study, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outcome: Outcome = {
        "device": devices.describe(devices.select(device)),
        "environment": devices.environment(),
    }
    try:
        outcome |= {"status": "ok", "reason": None, "found": work()}
    except Exception as error:  # a cell that fails is a result; the others go on
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        status = "out of memory" if devices.is_out_of_memory(error) else "failed"
        outcome |= {"status": status, "reason": message[:500]}
    sender.send(outcome)
