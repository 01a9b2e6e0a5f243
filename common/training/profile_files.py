"""The files of a profiled run, made from the traces that the profiler exported, with the events
that plain TensorBoard shows.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracepage.errors import RunError, UsageError
from tracepage.files import write_json, write_text
from tracepage.readers import chrome_trace, graph_replays, pytorch
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import TimedRun
from tracepage.terminal import wrapped
from tracepage.views import run_page

from torch.utils.tensorboard import SummaryWriter

MEMORY_PAGE = """<!doctype html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0; url=run.html#memory">\
<title>Memory timeline</title>
<a href="run.html#memory">The memory of this run</a>
"""


def write(path: Path, content: dict[str, Any]) -> list[Path]:
    """Writes a profile, TensorBoard's events, run.html and, with memory, memory_timeline.html from
    the trace that the profile names, beside it.

    Args:
        path: of the profile, profile_STAMP.json.
        content: what the trace does not tell: `run`, `trace`, `attention_only` and, where they were
            counted, `operator_flops`.

    RunError: a trace cannot be read, or a file cannot be written; then TensorBoard's folder is
    removed.
    """
    folder = path.parent
    stamp = path.stem.removeprefix("profile_")
    exported = folder / content["trace"]
    try:
        trace = graph_replays.load(exported)
        eager = graph_replays.eager_path(exported)
        for note in trace.notes:
            print(f"note: {note}", file=sys.stderr)
        tables = chrome_trace.profile_tables(trace, content["attention_only"])
        profile: Any = {"schema": "tiny-llama-profile/1", **content, **tables}
        write_json(path, profile)
        written = [path, exported, *([eager] if eager.exists() else [])]
        written += sorted(folder.glob(f"trace_rank*_{stamp}.json"))  # of the other processes
        try:
            written.append(write_events(step_profile.events(path, profile["run"]), profile["run"]))
        except UnicodeEncodeError:
            print("note: TensorBoard writes into no folder whose name is not UTF-8", flush=True)
        if profile["profiled_steps"] and profile["operators"]:
            if profile["memory_peak_bytes"] is not None:
                write_text(folder / "memory_timeline.html", MEMORY_PAGE)
                written.append(folder / "memory_timeline.html")
            source = replace(pytorch.read_profile(path), trace=trace)
            page = run_page.make_page([source])
            written += page.write(folder, "run", ("html",))
            print(wrapped(f"  verdict      {page.first_sentence()}", 15))
        return written
    except (OSError, UsageError) as error:
        shutil.rmtree(step_profile.events(path, content["run"]), ignore_errors=True)
        raise RunError(f"the profile could not be written into {folder}: {error}") from error


def write_events(folder: Path, run: TimedRun) -> Path:
    """Writes one event file into `folder`, which is a run of its own for TensorBoard: loss, step
    time and tokens/s by step.
    """
    training = run["training"]
    losses = run["loss"]["all"]
    times = run["step_ms"]["all"]
    # Tokens of a step of all processes.
    tokens = run_record.processes(run) * training["batch_size"] * training["sequence_length"]
    first = training.get("first_step", 1)  # above 1 in a run that went on from a checkpoint
    with SummaryWriter(str(folder)) as writer:
        for step, (loss, milliseconds) in enumerate(zip(losses, times, strict=True), start=first):
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("train/step_ms", milliseconds, step)
            writer.add_scalar("train/tokens_per_second", tokens / milliseconds * 1e3, step)
    return folder
