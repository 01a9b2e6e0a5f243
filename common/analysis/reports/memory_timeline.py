"""Memory over the profiled steps, and who holds it at the peak: one HTML page that needs nothing else.

Drawn from the allocator's events in the trace. What was allocated before the profiler looked (weights, and optimizer
state if the first step was over) appears only in the GPU allocator's total; on a CPU the total starts at zero.
"""

import html
import io
from pathlib import Path
from typing import Any

from common.analysis.output import tables
from common.analysis.profiles.chrome_trace import Trace
from common.files import write_text

EARLIER = "allocated before the profile"
PHASE_COLORS = {"forward": "#0072B2", "backward": "#D55E00", "optimizer": "#009E73"}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Memory timeline</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
svg{{max-width:100%;height:auto}} td,th{{padding:.2rem .8rem;text-align:right}} td:first-child,th:first-child{{text-align:left}}
table{{border-collapse:collapse}} tr{{border-bottom:1px solid #ccc}}</style></head>
<body><h1>Memory timeline</h1>
<p>{setting}</p>
<p>{reading}</p>
{plot}
<h2>Alive at the peak: {peak:.1f} MiB</h2>
<table><tr><th>allocated in</th><th>phase</th><th>MiB</th><th>% of peak</th></tr>
{rows}
</table></body></html>
"""


def _events(trace: Trace):
    """The device's events: the GPU's where there are any, else the CPU's."""
    on_gpu = trace.memory[trace.memory.device == "gpu"]
    return on_gpu if len(on_gpu) else trace.memory


def at_peak(trace: Trace) -> tuple[int, list[tuple[str, str, int]]]:
    """Bytes at the peak, and (span, phase, bytes) of the allocations alive then, largest first."""
    events = _events(trace)
    alive: dict[int, tuple[str, str, int]] = {}
    peak = int(events.total_bytes.max())
    for event in events.itertuples():
        if event.bytes > 0:
            alive[event.address] = (event.span, event.phase, event.bytes)
        else:
            alive.pop(event.address, None)
        if event.total_bytes == peak:
            break
    added: dict[tuple[str, str], int] = {}
    for span, phase, size in alive.values():
        added[span, phase] = added.get((span, phase), 0) + size
    rows = [(span, phase, size) for (span, phase), size in added.items()]
    earlier = peak - sum(added.values())
    if earlier > 0:
        rows.append((EARLIER, "", earlier))
    return peak, sorted(rows, key=lambda row: -row[2])


def figure(trace: Trace):
    """A matplotlib Figure: allocated MiB over time, coloured by the phase that allocates or frees."""
    from matplotlib.figure import Figure

    events = _events(trace)
    begin = events.time_us.min()
    result = Figure(figsize=(9, 4), layout="constrained")
    axes = result.add_subplot()
    times, mebibytes = (events.time_us - begin) / 1e3, events.total_bytes / 2**20
    axes.step(times, mebibytes, where="post", color="0.6", linewidth=0.8)
    for phase, color in PHASE_COLORS.items():
        mine = events.phase == phase
        axes.scatter(times[mine], mebibytes[mine], s=4, color=color, label=phase)
    for start in trace.steps.start_us:
        axes.axvline((start - begin) / 1e3, color="0.8", linewidth=0.8, zorder=0)
    axes.set_xlabel("ms since the first event (grey lines: a step begins)")
    axes.set_ylabel("allocated, MiB")
    axes.set_ylim(0, 1.05 * mebibytes.max())
    axes.legend(loc="lower right")
    return result


def write(path: Path, trace: Trace, profile: dict[str, Any]) -> Path:
    """Writes the page. `profile` is of schema tiny-llama-profile/1 and has memory events."""
    import matplotlib

    run = profile["run"]
    peak, rows = at_peak(trace)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memory"}):
        buffer = io.StringIO()
        figure(trace).savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    cells = "\n".join(
        f"<tr><td>{html.escape(span)}</td><td>{phase}</td><td>{size / 2**20:.2f}</td><td>{100 * size / peak:.1f}</td></tr>"
        for span, phase, size in rows
    )
    setting = (
        f"{run['version']}, {run['device']['name']}, {run['precision']['compute']}, batch {run['training']['batch_size']}, "
        f"sequence {run['training']['sequence_length']}, {tables.figure(run['parameters'])} parameters."
    )
    reading = (
        "In the forward pass memory climbs as each layer keeps what its backward will need; in the backward pass it falls "
        "while gradients take its place; the optimizer adds its state in the first step and temporary tensors in each. "
        + ("Counted by the GPU allocator." if len(profile["kernels"]) else "On a CPU the count starts at zero with the profile.")
    )
    page = PAGE.format(
        setting=html.escape(setting), reading=reading, plot=svg[svg.index("<svg") :], peak=peak / 2**20, rows=cells
    )
    write_text(path, page)
    return path
