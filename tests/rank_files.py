"""Traces of the ranks of a job, written by hand."""

import json
from pathlib import Path

from tests.small_traces import event

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NAMES = {"gemm": "gemm", "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"}


def write_rank(
    folder: Path,
    rank: int,
    calls: list[tuple],
    clock_us: float = 0,
    world_size: int | None = None,
    begin_us: float = 0,
    steps: int = 2,
) -> Path:
    """The trace of a rank. Each of its steps computes from 0 to `begin_us`, or waits in the data
    loader until then if that is below 0; and runs `calls`, with whose last it ends: (kind, start, end) in us, with a kind
    "gemm" or "send", or a group's name and ranks as in "tp [0, 1]", or "" for a collective without arguments.
    """
    events = []
    number = 0
    step_us = calls[-1][2]
    for step in range(steps):
        first = clock_us + step_us * step
        events.append(
            event("user_annotation", f"ProfilerStep#{step}", first, first + step_us, rank)
        )
        if begin_us < 0:
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            events.append(event("user_annotation", name, first, first - begin_us, rank))
        lead = [("gemm", 0, begin_us)] if begin_us > 0 else []
        for kind, start, end in [*lead, *calls]:
            number += 1
            about = {"stream": 7 if kind == "gemm" else 20, "correlation": number}
            if kind not in (*NAMES, ""):
                group, members = kind.split(" ", 1)
                about |= {"Process Group Name": group, "Process Group Ranks": members}
                about |= {"Collective name": "allreduce", "Seq": step}
            launch = first + max(start - 1, 0)
            call = {"correlation": number}
            events.append(event("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, 1, **call))
            name = NAMES.get(kind, KERNEL)
            events.append(event("kernel", name, first + start, first + end, 0, **about))
    content: dict = {"traceEvents": events}
    if world_size:
        content = {"distributedInfo": {"rank": rank, "world_size": world_size}} | content
    path = folder / f"trace_rank{rank}.json"
    path.write_text(json.dumps(content))
    return path


def write_late(folder: Path, late_us: float = 100, in_loader: bool = False) -> list[Path]:
    """Two ranks whose clocks are 5 s apart. Rank 1 begins `late_us` later, so rank 0 waits so long
    in an all-reduce, after both have computed 500 us; its transfer takes 20 us.
    """
    end = 520 + late_us
    begin = -late_us if in_loader else late_us
    late = [("gemm", late_us, late_us + 500), ("", late_us + 500, end)]
    return [
        write_rank(folder, 0, [("gemm", 0, 500), ("", 500, end)], world_size=2),
        write_rank(folder, 1, late, 5e6, 2, begin),
    ]
