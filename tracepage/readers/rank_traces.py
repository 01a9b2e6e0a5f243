"""Finds the traces of a job's ranks: one file a rank, in a folder or named one by one.

A trace of torch.profiler tells its rank and the number of ranks where `torch.distributed` was
initialized; else its name tells the rank (`trace_rank3.json`).
"""

import re
from collections.abc import Sequence
from pathlib import Path

from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.readers.trace_events import read_job

RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


def rank_of(path: Path) -> tuple[int | None, int]:
    """Rank and number of ranks of a trace; None and 0 where it tells neither."""
    job = read_job(path)
    match = RANK.search(path.name)
    by_name = int(match[1]) if match else None
    return job.get("rank", by_name), job.get("world_size", 0)


def find(paths: Sequence[Path]) -> tuple[dict[int, Path], list[str]]:
    """The traces by rank, in order, of a folder or of several files, and notes on others; both
    empty where these are not the traces of several ranks, but one file, or two to compare.

    In a folder the newest file of a rank counts. UsageError: more than two files are not one trace
    for each rank, or the files are of jobs of different sizes.
    """
    candidates = list(paths)
    if len(paths) == 1:
        is_folder = paths[0].is_dir()
        candidates = load_kernels.find(paths[0]).get("pytorch-trace", []) if is_folder else []
    traces: dict[int, Path] = {}
    sizes: dict[int, Path] = {}
    for path in candidates:
        rank = None
        size = 0
        if path.is_file() and load_kernels.recognize(path) == "pytorch-trace":
            rank, size = rank_of(path)
        if rank is not None and rank not in traces:
            traces[rank] = path
            sizes.setdefault(size, path)
        elif len(paths) > 2:
            raise UsageError(
                f"{path} is no other rank of one job (rank: {rank}): give two files to compare, "
                "or one trace of torch.profiler for each rank"
            )
    if len(traces) < 2:
        return {}, []
    if len(sizes) > 1:
        of_jobs = ", ".join(f"{path} of {size or 'unknown'}" for size, path in sizes.items())
        raise UsageError(f"the traces are of jobs with different numbers of ranks: {of_jobs}")
    older = len(candidates) - len(traces)
    notes = [f"Not read: {older} other traces in the folder."] if older else []
    return dict(sorted(traces.items())), notes
