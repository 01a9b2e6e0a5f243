"""The report on a batch_search.json: the trials as a table and a CSV file, and the answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracepage import files
from tracepage.show import run_facts
from tracepage.show.report import Report

SCHEMA = "tiny-llama-batch-search/1"
COLUMNS = {  # name in the CSV file: head of the table
    "batch_size": "B",
    "ms": "ms/step",
    "p20": "p20",
    "p80": "p80",
    "tokens_per_second": "tokens/s",
    "peak_mib": "peak MiB",
    "memory_percent": "% of memory",
    "status": "status",
}


def render_batch_search(path: Path) -> Report:
    """The curve of what was measured, and the answer."""
    measured = files.read_json(path, SCHEMA)
    memory = measured["device"]["memory_mib"]
    rows = curve(measured)
    report = Report("Batch size search")
    report.text(
        f"{measured['version']}, {run_facts.describe(measured, 'batch_size')}. Step times are "
        f"medians. Memory: peak of the {measured['memory_kind']}; % of the {memory:,.0f} MiB that "
        "there are.",
        f"Made by {run_facts.origin(measured)}.",
    )
    report.table([*COLUMNS.values()], rows)
    report.csv("batch_search", [*COLUMNS], rows)
    report.json("batch_search", measured)
    usage = f"The target is at most {100 * measured['target_memory_usage']:g} % of the memory."
    report.text(f"Doubling ended: {measured['ended']}. {usage}")
    size = measured["batch_size"]
    if size:
        report.text(f"Batch size for {measured['target']}: {size}. It is {measured['reason']}.")
    return report


def curve(measured: Mapping[str, Any]) -> list[list[Any]]:
    """A row of COLUMNS per trial, smallest batch first; None where the trial did not end."""
    rows = []
    for trial in sorted(measured["trials"], key=lambda trial: trial["batch_size"]):
        step = trial["step_ms"] or dict.fromkeys(("median", "p20", "p80"))
        peak = trial["peak_mib"]
        percent = peak and 100 * peak / measured["device"]["memory_mib"]
        times = [step["median"], step["p20"], step["p80"]]
        rates = [trial["tokens_per_second"], peak, percent]
        rows.append([trial["batch_size"], *times, *rates, trial["status"]])
    return rows
