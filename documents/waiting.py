"""The cases of the lesson "Why does the GPU wait?"."""

import re
from pathlib import Path

from tracepage import files
from tracepage.causes import waits
from tracepage.readers import load_kernels
from tracepage.show import tables

# The step without any wait, where it is given, and without this one.
BOUNDS = re.compile(r"([\d.]+) ms \((?:the host|[\d.]+ times)")
HEADER = (
    "case",
    "fault",
    "cause",
    "profiled step, ms",
    "wait, ms",
    "without it, ms",
    "measured with it, ms",
    "measured without, ms",
)


def cases(record: Path, *traces: Path) -> str:
    """What the page of each trace says, beside the measured steps of its case."""
    rows = []
    for case, path in zip(files.read_json(record)["cases"], traces, strict=True):
        causes = waits.attribute(load_kernels.load(path))
        assert causes  # A recorded case has a GPU that works.
        verdict = causes.verdict
        bounds = BOUNDS.findall(verdict["sentence"])
        predicted = [causes.step_ms, verdict["ms"], " to ".join(bounds)]
        measured = [case["ms"], case["ms_without"]]
        rows.append([case["case"], case["fault"], verdict["cause"], *predicted, *measured])
    return tables.markdown(HEADER, rows)
