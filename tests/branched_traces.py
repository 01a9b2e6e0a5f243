"""A GPU's step with two branches, written by hand: its critical path, gaps and overlaps are known.

    stream 7    product 0-10    swiglu 12-22    norm 22-28    adamw 33-43
    stream 8             weight 11-30                             copy 36-40

Its critical path is product, weight, adamw: 10 + 19 + 10 us, with gaps of 1 and 3 us. Two kernels
run from 12 to 28 us and from 36 to 40 us.
"""

import json
from pathlib import Path

from tests.records import record
from tests.small_traces import event
from tracepage.files import write_json
from tracepage.readers import chrome_trace, graph_replays

CEILINGS = {
    "bytes_per_second": 1e12,
    "flops_per_second": 1e14,
    "operation_seconds": 1e-6,
    "precision": "bf16",
}
PRODUCT = "nvjet_product"
KERNELS = [  # name, annotation around its launch, stream, start and end in us
    (PRODUCT, "attention", 7, 0, 10),
    ("_swiglu", "mlp", 7, 12, 22),
    ("nvjet_weight", "backward", 8, 11, 30),
    ("_rms_norm_forward", "norm", 7, 22, 28),
    ("_adamw", "optimizer", 7, 33, 43),
    ("Memcpy", "optimizer", 8, 36, 40),
]


def trace(graph: bool = False, scales: tuple[float, ...] = (1.0,)) -> dict:
    """A step for each factor by which all of its times are multiplied; as kernels alone, or as one
    graph.

    Each kernel is launched by an operator of its own, `aten::mm` with [64, 32] x [32, 16] in bf16
    for products.
    """
    events = []
    for number, scale in enumerate(scales):
        begin, first = 1000 * number, 100 * number
        events += [event("user_annotation", f"ProfilerStep#{number}", begin, begin + 900)]
        if graph:
            events += [
                event("cpu_op", "aten::copy_", begin + 1, begin + 2),
                event("cuda_runtime", "cudaGraphLaunch", begin + 3, begin + 4, correlation=first),
            ]
        for i, (name, span, stream, start, end) in enumerate(KERNELS):
            at = begin + 10 * i + 1
            if not graph:
                product = (
                    {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2}
                    if "nvjet" in name
                    else {}
                )
                events += [
                    event("user_annotation", span, at, at + 8),
                    event(
                        "cpu_op", "aten::mm" if product else "Function", at + 1, at + 7, **product
                    ),
                    event(
                        "cuda_runtime", "cudaLaunchKernel", at + 2, at + 3, correlation=first + i
                    ),
                ]
            place = begin + 200 + scale * start, begin + 200 + scale * end
            events += [
                event(
                    "kernel",
                    name,
                    *place,
                    0,
                    stream=stream,
                    correlation=first + (0 if graph else i),
                )
            ]
    return {"traceEvents": events}


def write(folder: Path, captured: bool = False, scales: tuple[float, ...] = (1.0,), **run) -> Path:
    """profile_1.json with its trace, and that of the eager step if the step is captured; `run`
    changes parts of its record.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "trace_1.json"
    path.write_text(json.dumps(trace(captured, scales)))
    if captured:
        (folder / "eager_trace_1.json").write_text(json.dumps(trace()))
        run = {"settings": {"capture_step": True}} | run
    profile = {
        "schema": "tiny-llama-profile/1",
        "run": record(ceilings=CEILINGS, **run),
        "attention_only": False,
        "trace": path.name,
        **chrome_trace.profile_tables(graph_replays.load(path)),
    }
    write_json(folder / "profile_1.json", profile)
    return folder / "profile_1.json"
