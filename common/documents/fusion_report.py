"""The report on a fused version: the measurements of it and of its baseline, as Markdown and as one HTML page.

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
from common.analysis.output import plots, run_facts
from common.analysis.output.report import Report
from common.analysis.output.run_facts import origin
from common.analysis.profiles import kernel_names
from common.analysis.reports import bottlenecks, roofline
from common.analysis.reports.bottlenecks import Step
from common.analysis.reports.profile_summary import PHASE_COLOURS
from common.errors import UsageError
from common.files import writable_file
from common.records import step_profile
from common.studies import ablation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "What fusion changes"
NAMES = ("baseline", "fused")
TOP = 10  # names in the table of kernels

# The commands that make the inputs, in the folder of Version 2.
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
    study = ablation.read(inputs.ablation) if inputs.ablation else None
    records = [*(step.profile["run"] for step in steps), *(run.record for run in lengths), *([study] if study else [])]
    report = Report(TITLE)
    add_conditions(report, paths, steps)
    add_step_time(report, steps)
    add_kernel_counts(report, reduction)
    add_memory(report, lengths)
    add_ceilings(report, steps)
    add_fusions(report, study)
    report.section("How to repeat", "repeat")
    report.text("In the folder of the version that a script belongs to:")
    report.commands([f"python {command}" for command in [*(record["command"] for record in records), shlex.join(sys.argv)]])
    written = report.write(output.parent, output.stem, ("md", "html"), "--output")
    return f"written: {', '.join(map(str, written))}"


def _profile(folder: Path, script: str) -> Path:
    """The newest profile in a folder, or the profile itself."""
    if not folder.is_file() and not any(folder.glob("profile_*.json")):
        command = f"python {script} --num-steps 30 --profile-dir {shlex.quote(str(folder))}"
        raise UsageError(f"{folder} holds no profile_*.json: make one with `{command}`")
    return step_profile.find(folder)


def add_conditions(report: Report, paths: Sequence[Path], steps: Sequence[Step]) -> None:
    """Adds where both ran, which files were read, and the numbers of the runs as a whole."""
    runs = [step.profile["run"] for step in steps]
    last = min(len(run["loss"]["all"]) for run in runs)
    report.section("Conditions")
    report.text(f"{run_facts.describe(runs[0])}. Ratios are baseline / fused: above 1 the fused version needs less.")
    for name, path, run in zip(NAMES, paths, runs, strict=True):
        report.text(f"{name.capitalize()}: {run['version']}, {origin(run)}; profile `{path}`.")
    report.table(["quantity", *NAMES, "ratio"], regression.rows(*runs, last))
    report.text(*run_facts.doubts(dict(zip(NAMES, runs, strict=True))))


def add_step_time(report: Report, steps: Sequence[Step]) -> None:
    """Adds the time of a profiled step, by span and phase."""
    bars, on_gpu = _bars(steps), steps[0].on_gpu
    rest = {
        "GPU idle" if on_gpu else "outside operators": [step.outside_us for step in steps],
        "whole step": [step.us for step in steps],
    }
    rows = [[*labels, was, now, now - was] for labels, (was, now) in bars.items()]
    rows += [[name, "", was / 1e3, now / 1e3, (now - was) / 1e3] for name, (was, now) in rest.items()]
    counts = " and ".join(str(step.profile["profiled_steps"]) for step in steps)
    report.section("Step time")
    report.text(
        f"Time {'on the GPU' if on_gpu else 'on the CPU'} of a step under the profiler (means of {counts} steps). Backward work "
        "counts for the span whose forward work it differentiates. The figure leaves out time outside all spans."
    )
    if steps[0].profile["attention_only"]:
        report.text("Only attention was kept, so the whole step is that of attention.")
    report.figure(lambda: _step_figure(bars), "step-time", "Time of each span before and after, by phase")
    report.table(["span", "phase", *(f"{name} ms" for name in NAMES), "difference"], rows)


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
    result.legend(loc="outside upper center", ncols=4)
    return result


def add_kernel_counts(report: Report, reduction: kernel_reduction.Reduction) -> None:
    """Adds the launches before and after: by kind of work, by span, and the names with the largest changes."""
    header = [f"{name} {what}" for what in (reduction.counted, "ms") for name in NAMES]

    def add(title: str, labels: Sequence[str], rows: Sequence[kernel_reduction.Difference], code: Sequence[str] = ()) -> None:
        body = [[*row[: len(labels)], row.calls_before, row.calls_after, row.us_before / 1e3, row.us_after / 1e3] for row in rows]
        report.table([*labels, *header], body, title, code=code)

    changed = [row._replace(name=kernel_names.short_name(row.name)) for row in reduction.by_name if row.change != "same"]
    report.section("Kernel counts", "kernels")
    report.text(kernel_reduction.headline(reduction), *(f"{note[0].upper()}{note[1:]}." for note in reduction.notes))
    description = f"{reduction.counted} and their time before and after, by kind of work and by span"
    report.figure(lambda: kernel_reduction.figure(reduction), "kernels", description)
    add("By kind of work", ["kind"], [*reduction.by_kind, reduction.total])
    add("By span", ["span", "phase"], reduction.by_span)
    add(f"Largest changes, {min(TOP, len(changed))} of {len(changed)}", ["name", "kind"], changed[:TOP], ["name"])


def add_memory(report: Report, runs: list[sequence_memory.Run]) -> None:
    """Adds peak memory against sequence length, with and without the [S, S] matrix."""
    report.section("Memory against sequence length", "memory")
    if not runs:
        report.text("Not measured; these commands do it, with flash attention and without:")
        report.commands(SEQUENCES)
        return
    report.text(sequence_memory.conditions(runs), *sequence_memory.findings(runs))
    description = "Peak memory, and that of the step alone, over the sequence length"
    report.figure(lambda: sequence_memory.figure(runs), "memory", description)
    report.table(*sequence_memory.table(runs))
    report.table(*sequence_memory.fit_table(runs), title="Fit")


def add_ceilings(report: Report, steps: Sequence[Step]) -> None:
    """Adds how near each span is to the device's ceilings, before and after."""
    report.section("Roofline")
    measured = steps[0].profile["run"]["ceilings"]
    if not measured:
        report.text(f"Not measured; this does it: `python {SCRIPTS[0]} --profile-dir DIR --measure-peak`.")
        return
    points = [
        point._replace(group=name)
        for name, step in zip(NAMES, steps, strict=True)
        for point in roofline.from_profile(step.profile)
        if point.group == "span" and point.flops
    ]
    order = list(dict.fromkeys(point.name for point in points))
    points.sort(key=lambda point: order.index(point.name))
    figure = roofline.figure([point._replace(name=f"{point.name}, {point.group}") for point in points], measured)
    figure.axes[0].set_title("")  # the text gives the ceilings
    report.text(f"Baseline's {roofline.describe(measured)}. Above 100 % the data came from a cache, or the ceiling is too low.")
    report.figure(lambda: figure, "roofline", "FLOP/s of each span under the roofline, before and after")
    report.table(*roofline.table(points, measured))


def add_fusions(report: Report, study: dict[str, Any] | None) -> None:
    """Adds the effect of each fusion on its own."""
    report.section("Ablation")
    if not study:
        report.text("Not measured; this command does it:")
        report.commands([ABLATION])
        return
    effects = ablation.effects(study["combinations"])
    report.text(ablation.conditions(study), *ablation.notes(study))
    description = "Step time of each combination of fusions, and the effect of each fusion"
    report.figure(lambda: ablation.figure(study, effects), "ablation", description)
    report.table(*ablation.effect_table(study, effects), title="Effect of each fusion, without / with (above 1 it helps)")
    report.table(*ablation.combination_table(study), title="Combinations")
