"""Two runs side by side: their numbers, their losses, and reasons to doubt their times."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracepage.records import run_record
from tracepage.records.run_record import TimedRun
from tracepage.show import run_facts, tables
from tracepage.show.report import Report

# Two files and their records, under the names by which tables show them.
RunPair = Mapping[str, tuple[Path, TimedRun]]


def input_differences(before: TimedRun, after: TimedRun) -> list[str]:
    """The inputs of the loss curves that differ."""
    return run_record.differences(
        run_record.training_inputs(before), run_record.training_inputs(after)
    )


def add_origins(report: Report, pair: RunPair) -> None:
    """Adds the files of the runs, and the commands that made them."""
    report.facts(
        [(name, f"{path}, from {run_facts.origin(run)}") for name, (path, run) in pair.items()]
    )


def add_runs(report: Report, pair: RunPair) -> None:
    """Adds conditions, files, numbers, the difference of the losses, and doubts about the times."""
    (_, before), (_, after) = pair.values()
    report.text(run_facts.describe(before))
    add_origins(report, pair)
    numbers_before: dict[str, Any] = {**run_facts.columns(before), **before["step_ms"]}
    numbers_after: dict[str, Any] = {**run_facts.columns(after), **after["step_ms"]}
    rows = []
    for name in ("ms/step", "p20", "p80", "peak MiB", "tokens/s"):
        ratio = None if name == "tokens/s" else numbers_before[name] / numbers_after[name]
        rows.append([name, numbers_before[name], numbers_after[name], ratio])
    report.table(["quantity", *pair, " / ".join(pair)], rows)
    differing = input_differences(before, after)
    if differing:
        losses = f"not compared, they differ in {'; '.join(differing)}"
    else:
        difference, steps = run_record.loss_difference(before, after)
        losses = f"largest difference {difference:.2g} nats over {tables.counted(steps, 'step')}"
    report.text(
        f"Loss curves: {losses}. Peak memory is that of the {before['memory']['kind']}.",
        *run_facts.doubts({name: run for name, (_, run) in pair.items()}),
    )
