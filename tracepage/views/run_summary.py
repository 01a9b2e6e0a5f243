"""What a page says first, as short Markdown or as JSON, for the log of a test machine or an
assistant.

The JSON of one file, with times in ms of a step:

    file, device, steps    what ran; steps is null where the file has none, and then the times are
                           those of the whole file
    step_ms
    verdict                cause, ms, gain (times as fast without it, at most), sentence
    parts                  cause, kind (of work), ms, count, where; they add up to step_ms
    notes                  caveats of the file

Of two files it has `runs`, a list of both, and `changes`: part, before_ms, after_ms, change_ms.
"""

from collections.abc import Sequence
from typing import Any

from tracepage.causes.waits import StepCauses
from tracepage.errors import UsageError
from tracepage.readers.source import OTHER_TRACE, Source
from tracepage.show.report import Report
from tracepage.terminal import shortened
from tracepage.views import launch_changes, launches, run_page, step_causes

TOP = 10  # kernels
NAME = 60  # characters of a kernel's


def _attribute(source: Source) -> StepCauses:
    if source.kind == OTHER_TRACE:
        raise UsageError(
            f"{source.path} has no kernels and no operators of PyTorch: "
            "only a page shows it, --output FILE.html"
        )
    return step_causes.attribute(source)


def summary_report(sources: Sequence[Source]) -> Report:
    """Verdict, parts, longest waits and kernels of a file, or what changed between two."""
    causes = list(map(_attribute, sources))
    titles = list(map(run_page.title, sources))
    report = Report(" and ".join(titles))
    if len(sources) == 2:
        sentences = [side.verdict["sentence"] for side in causes]
        report.facts(list(zip(("1", "2"), sentences, strict=True)))
        report.text(*launch_changes.device_notes(*sources))
        step_causes.add_changes(report, *causes)
        return report
    [source] = sources
    step_causes.add_sections(report, causes[0], source.trace)
    label = "operator" if source.are_operators else "kernel"
    rows = launches.summary(source).head(TOP)
    header, body = launches.kernel_rows(rows, label, source.steps or 1)
    named = [[shortened(name, NAME), *numbers] for name, *numbers in body]
    report.section(f"{label.capitalize()}s that take longest")
    report.table(header, named, code=[label])
    report.text(*source.notes)
    return report


def summary_json(sources: Sequence[Source]) -> dict[str, Any]:
    """The content of the JSON file."""
    causes = list(map(_attribute, sources))
    runs = [_run(*side) for side in zip(sources, causes, strict=True)]
    if len(runs) == 1:
        return runs[0]
    keys = ("part", "before_ms", "after_ms", "change_ms")
    rows = [dict(zip(keys, row, strict=True)) for row in step_causes.changes(*causes)]
    return {"runs": runs, "changes": rows}


def _run(source: Source, causes: StepCauses) -> dict[str, Any]:
    return {
        "file": str(source.path),
        "device": source.device,
        "steps": source.steps,
        "step_ms": causes.step_ms,
        "verdict": causes.verdict,
        "parts": causes.parts,
        "notes": source.notes,
    }
