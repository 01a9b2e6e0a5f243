"""Merges the traces of all processes of a job into one for Perfetto, with a group of tracks for each rank."""

from pathlib import Path
from typing import Any

from common.analysis.output.tables import counted
from common.analysis.profiles import communication
from common.analysis.profiles.json_elements import elements
from common.errors import UsageError
from common.files import writable_file, write_json


def write(folder: Path, output: Path) -> int:
    """Writes the merged trace of the one run whose traces are in a folder; returns the number of ranks."""
    writable_file(output, "--output")
    paths = communication.find(folder)
    if len(paths) < 2:
        raise UsageError(f"{folder} holds {counted(len(paths), 'trace')} (trace_*.json): run torchrun with --profile-dir")
    ranks = [communication.rank_of(path) for path in paths]
    if missing := sorted({*range(max(ranks))} - {*ranks}):
        raise UsageError(f"{folder} lacks the traces of ranks {', '.join(map(str, missing))}")
    if ranks != [*range(len(paths))]:
        raise UsageError(f"{folder} holds traces of several runs (ranks {ranks}): give the folder of one run")
    write_json(output, merge(paths))
    return len(paths)


def merge(paths: list[Path]) -> dict[str, Any]:
    """One trace with the tracks of all ranks, named by rank, from traces in the order of the ranks.

    Times stay as they are: processes of one host share a clock, and between hosts clocks differ.
    """
    merged = []
    for rank, path in enumerate(paths):
        for event in elements(path, "traceEvents", "holds no trace of torch.profiler"):
            if not isinstance(event, dict):
                raise UsageError(f"{path} is no trace of torch.profiler: one of its traceEvents is no object")
            event["pid"] = f"rank {rank}: {event.get('pid', '')}"
            if "id" in event:  # of an arrow
                event["id"] = f"{rank}.{event['id']}"
            if event.get("name") == "process_sort_index":  # a rank's tracks stay together
                event["args"] = {"sort_index": rank}
            if event.get("name") == "process_name":
                arguments = event.get("args")
                name = arguments.get("name", "") if isinstance(arguments, dict) else ""
                event["args"] = {"name": f"rank {rank}: {name}"}
            merged.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": merged}
