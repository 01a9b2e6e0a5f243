"""The report on a fused version: what was measured of it and of its baseline, as Markdown and as one HTML page.

Sections: conditions, step time by span and phase, kernel counts, memory against sequence length, roofline, ablation, and the
commands that measure it all again. The two profiles must be there; a section whose own measurement is missing names the
command that makes it.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.comparisons import kernel_reduction, regression, sequence_memory
from common.analysis.output import plots, report
from common.analysis.output.report import Section, Table
from common.analysis.profiles import kernel_names, run_record, step_profile
from common.analysis.profiles.run_record import origin
from common.analysis.reports import bottlenecks, roofline
from common.analysis.reports.bottlenecks import Step
from common.errors import UsageError
from common.files import read_json, writable_file, write_text
from common.studies import ablation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "What fusion changes"
NAMES = ("baseline", "fused")
PHASE_COLOURS = {"forward": plots.SKY, "backward": plots.VERMILION, "optimizer": plots.GREEN, "other": plots.PURPLE}
TOP = 10  # names in the table of kernels

# What makes the inputs, from the folder of Version 2.
SCRIPTS = ("../version1_pytorch_baseline/tiny_llama_v1.py", "tiny_llama_v2.py")
ABLATION = "python fusion_ablation_study.py --all-combinations"
SEQUENCES = [
    "for seq_len in 128 256 512 1024; do python tiny_llama_v2.py --seq-len $seq_len --batch-size 4 --enable-memory-profiling "
    f"{flags}--profile-dir ./{kind}_attention_seq${{seq_len}}; done"
    for kind, flags in (("flash", ""), ("plain", "--disable-flash-attention "))
]

Bars = dict[tuple[str, str], tuple[float, float]]  # by span and phase: ms before and after


class Inputs(NamedTuple):
    """Profiles of both versions (folders or files), an ablation or None, folders of profiles at several lengths or none."""

    baseline: Path
    fused: Path
    ablation: Path | None
    sequences: list[Path]


def write(inputs: Inputs, output: Path) -> str:
    """Writes `output` (Markdown) and the page beside it, of the same name in .html; returns a line that names both.

    Raises:
        UsageError: a profile is missing, the two cannot be compared, a file is damaged, or `output` is no .md or cannot be
            written.
    """
    if output.suffix != ".md":
        raise UsageError(f"--output {output}: name a .md file; the page is written beside it as .html")
    paths = [_profile(folder, script) for folder, script in zip((inputs.baseline, inputs.fused), SCRIPTS, strict=True)]
    writable_file(output, "--output")
    reduction = kernel_reduction.compare(*paths)  # refuses runs that cannot be compared
    steps = [bottlenecks.read_step(path) for path in paths]
    lengths = sequence_memory.read(inputs.sequences) if inputs.sequences else []
    study = read_json(inputs.ablation, ablation.SCHEMA) if inputs.ablation else None
    records = [*(step.profile["run"] for step in steps), *(run.record for run in lengths), *([study] if study else [])]
    sections = [
        conditions(paths, steps), step_time(steps), kernel_counts(reduction), memory(lengths), ceilings(steps), fusions(study),
        repeat([record["command"] for record in records]),
    ]  # fmt: skip
    page = output.with_suffix(".html")
    write_text(output, report.markdown(TITLE, sections))
    write_text(page, report.html(TITLE, sections))
    return f"written: {output}, {page}"


def _profile(folder: Path, script: str) -> Path:
    """The newest profile in a folder, or the profile itself."""
    if not folder.is_file() and not any(folder.glob("profile_*.json")):
        command = f"python {script} --num-steps 30 --profile-dir {shlex.quote(str(folder))}"
        raise UsageError(f"{folder} holds no profile_*.json: make one with `{command}`")
    return step_profile.find(folder)


def conditions(paths: Sequence[Path], steps: Sequence[Step]) -> Section:
    """On what both ran, which files were read, and the figures of the runs as a whole."""
    runs = [step.profile["run"] for step in steps]
    last = min(len(run["loss"]["all"]) for run in runs)
    rows = [*regression.rows(*runs, last)[1:], ["parameters", *(run["parameters"] for run in runs), None]]
    text = [f"{run_record.setting(runs[0])}. Ratios are baseline / fused: above 1 the fused version needs less."]
    for name, path, run in zip(NAMES, paths, runs, strict=True):
        text.append(f"{name.capitalize()}: {run['version']}, {origin(run)}; profile `{path}`.")
    if any(run["step_ms"]["profiled"] >= len(run["step_ms"]["all"]) for run in runs):
        text.append("A run had all its steps under the profiler, which slows them: raise --num-steps.")
    return Section("conditions", "Conditions", text, tables=[Table("", ["quantity", *NAMES, "ratio"], rows)])


def step_time(steps: Sequence[Step]) -> Section:
    """Where a profiled step's time goes, by span and phase."""
    bars, on_gpu = _bars(steps), steps[0].on_gpu
    rest = {
        "GPU idle" if on_gpu else "outside operators": [step.outside_us for step in steps],
        "whole step": [step.us for step in steps],
    }
    rows = [[*labels, was, now, now - was] for labels, (was, now) in bars.items()]
    rows += [[name, "", was / 1e3, now / 1e3, (now - was) / 1e3] for name, (was, now) in rest.items()]
    counts = " and ".join(str(step.profile["profiled_steps"]) for step in steps)
    text = [
        f"Time {'on the GPU' if on_gpu else 'on the CPU'} of a step under the profiler (means of {counts} steps). Backward work "
        "counts for the span whose forward work it differentiates. The figure leaves out the time in no span, the table has it."
    ]
    if steps[0].profile["attention_only"]:
        text.append("Only attention was kept, so the whole step is that of attention.")
    table = Table("", ["span", "phase", *(f"{name} ms" for name in NAMES), "difference"], rows)
    return Section("step-time", "Step time", text, _step_figure(bars), "Time of each span before and after, by phase", [table])


def _bars(steps: Sequence[Step]) -> Bars:
    """The largest span of the baseline first."""
    times = [step_profile.span_milliseconds(step.profile) for step in steps]
    bars = {}
    for span in dict.fromkeys(span for each in times for span in each):
        for phase in PHASE_COLOURS:
            was, now = (each.get(span, {}).get(phase, 0.0) for each in times)
            if was or now:
                bars[span, phase] = was, now
    return bars


def _step_figure(bars: Bars) -> "Figure":
    """Two bars for each span, before above after, made of the phases."""
    spans = list(dict.fromkeys(span for span, _ in bars))
    result = plots.new(5, 1 + 0.42 * len(spans))
    axes = result.subplots()
    left, places = [0.0] * (2 * len(spans)), [i + shift for i in range(len(spans)) for shift in (-0.19, 0.19)]
    for phase, colour in PHASE_COLOURS.items():
        widths = [ms for span in spans for ms in bars.get((span, phase), (0.0, 0.0))]
        if any(widths):
            axes.barh(places, widths, 0.36, left=left, color=colour, label=phase)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(spans)), spans)
    axes.set(xlabel="ms of a step under the profiler\n(upper bar: baseline, lower bar: fused)", xlim=(0, 1.05 * max(left)))
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    return result


def kernel_counts(reduction: kernel_reduction.Reduction) -> Section:
    """What is launched before and after: by kind of work, by span, and the names with the largest changes."""
    header = [f"{name} {what}" for what in (reduction.counted, "ms") for name in NAMES]

    def table(title: str, labels: Sequence[str], rows: Sequence[kernel_reduction.Row]) -> Table:
        body = [[*row[: len(labels)], row.calls_before, row.calls_after, row.us_before / 1e3, row.us_after / 1e3] for row in rows]
        return Table(title, [*labels, *header], body)

    changed = [row._replace(name=kernel_names.short_name(row.name)) for row in reduction.by_name if row.change != "same"]
    parts = [
        table("By kind of work", ["kind"], [*reduction.by_kind, reduction.total]),
        table("By span", ["span", "phase"], reduction.by_span),
        table(f"Largest changes, {min(TOP, len(changed))} of {len(changed)}", ["name", "kind"], changed[:TOP]),
    ]
    text = [kernel_reduction.headline(reduction), *(f"{note[0].upper()}{note[1:]}." for note in reduction.notes)]
    description = f"{reduction.counted} and their time before and after, by kind of work and by span"
    return Section("kernels", "Kernel counts", text, kernel_reduction.figure(reduction), description, parts)


def memory(runs: list[sequence_memory.Run]) -> Section:
    """Peak memory against sequence length, with and without the [S, S] matrix."""
    name, title = "memory", "Memory against sequence length"
    if not runs:
        return Section(name, title, ["Not measured; these commands do it, with flash attention and without:"], commands=SEQUENCES)
    parts = [Table("", *sequence_memory.table(runs)), Table("Fit", *sequence_memory.fit_table(runs))]
    text = [sequence_memory.conditions(runs), *sequence_memory.findings(runs)]
    return Section(
        name,
        title,
        text,
        sequence_memory.figure(runs),
        "Peak memory, and that of the step alone, over the sequence length",
        parts,
    )


def ceilings(steps: Sequence[Step]) -> Section:
    """How near each span is to what the device can do, before and after."""
    measured = steps[0].profile["run"]["ceilings"]
    if not measured:
        text = [f"Not measured; this does it: `python {SCRIPTS[0]} --profile-dir DIR --measure-peak`."]
        return Section("roofline", "Roofline", text)
    points = [
        point._replace(group=name)
        for name, step in zip(NAMES, steps, strict=True)
        for point in roofline.from_profile(step.profile)
        if point.group == "span" and point.flops
    ]
    order = list(dict.fromkeys(point.name for point in points))
    points.sort(key=lambda point: order.index(point.name))
    labelled = [point._replace(name=f"{point.name}, {point.group}") for point in points]
    text = [f"Baseline's {roofline.describe(measured)}. Above 100 % the data came from a cache, or the ceiling was measured low."]
    figure, table = roofline.figure(labelled, measured), Table("", *roofline.table(points, measured))
    figure.axes[0].set_title("")  # the ceilings are in the text
    return Section("roofline", "Roofline", text, figure, "FLOP/s of each span under the roofline, before and after", [table])


def fusions(study: dict[str, Any] | None) -> Section:
    """What each fusion brings on its own."""
    if not study:
        return Section("ablation", "Ablation", ["Not measured; this command does it:"], commands=[ABLATION])
    effects = ablation.effects(study["combinations"])
    parts = [
        Table("Effect of each fusion, without / with (above 1 it helps)", *ablation.effect_table(study, effects)),
        Table("Combinations", *ablation.combination_table(study)),
    ]
    text = [ablation.conditions(study), *ablation.notes(study)]
    description = "Step time of each combination of fusions, and the effect of each fusion"
    return Section("ablation", "Ablation", text, ablation.figure(study, effects), description, parts)


def repeat(commands: Sequence[str]) -> Section:
    """The commands that measured, as their records hold them, and the one that made this report."""
    lines = [f"python {command}" for command in [*commands, shlex.join(sys.argv)]]
    return Section("repeat", "How to repeat", ["In the folder of the version that a script belongs to:"], commands=lines)
