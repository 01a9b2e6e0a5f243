"""The report on a scaling study: its conditions, its tables, the model on paper, a figure, and what could not be measured."""

from pathlib import Path

from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.errors import RunError
from common.records import study_files
from common.records.study_files import Scaling
from common.studies import job_runner
from common.studies.scaling import scaling_results
from common.studies.scaling.scaling_results import Row, place

LEAST = ("overlapped, ms", "of it waiting, ms", "peak MiB", "exposed communication, ms")


def analyze(path: Path) -> Report:
    """The report on a scaling.json, as .csv, .html, .json, .md and .png. Errors of `read`; RunError: nothing was measured."""
    measured = study_files.read_scaling(path)
    if all(cell["status"] != "ok" for cell in measured["cells"]):
        first = next(iter(measured["cells"]), None)
        raise RunError("nothing was measured" + (f"; the first: {place(first)}, {job_runner.reason(first)}" if first else ""))
    rows = scaling_results.results(measured)
    training = {"sequence_length": measured["sequence_length"]}
    conditions = run_facts.describe(measured | {"training": training}, "batch_size")
    filled = "Jobs ran at the same time where there were GPUs left for them, and shared the host."
    report = Report("Scaling over processes")
    report.json("scaling", measured)
    report.text(
        f"{conditions}. Step times are medians. Jobs of each cell: {measured['repeats']}; timed steps in each: "
        f"{measured['steps']}. Tokens/s are those of the job, memory is that of the process that took most.",
        *[filled] * measured.get("filled", False),
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    report.figure(lambda: figure(measured, rows, conditions), "scaling", "Efficiency over the number of processes")
    report.csv("scaling", scaling_results.COLUMNS, [[row[name] for name in scaling_results.COLUMNS] for row in rows])
    titles = {
        "weak": f"batch {measured['batch_size']} of each process",
        "strong": f"batch {measured['global_batch_size']} of the job",
    }
    for scaling, fixed in titles.items():
        shown = [row for row in rows if row["scaling"] == scaling]
        report.section(f"{scaling.capitalize()} scaling: {fixed}", scaling)
        header, body = scaling_results.step_table(shown)
        report.table(header, body, least=[name for name in LEAST if name in header])
        report.text(*scaling_results.multicast(measured))
        report.text(*run_facts.noise({place(row).replace(",", ""): row | {"median": row["ms"]} for row in shown if row["ms"]}))
    if scaling_results.communication_table(rows)[1]:
        report.section("Communication in a step", "communication")
        for scaling in titles:
            header, body = scaling_results.communication_table([row for row in rows if row["scaling"] == scaling])
            if body:
                report.table(header, body, title=f"{scaling} scaling", least=["exposed waiting, ms"])
        report.text(
            "From the traces of a few profiled steps, which the profiler slows; means over ranks and steps. Communication is "
            "overlapped + exposed, and also waiting + moving. Waiting is what a collective takes on a rank beyond the shortest "
            "time of the same collective among the ranks."
        )
    on_paper = {scaling: scaling_results.model_table(measured, scaling) for scaling in titles}
    link = measured["link"]
    if link and any(body for _, body in on_paper.values()):
        report.section("A model on paper", "paper")
        report.text(
            f"A model, not a measurement. Link: {tables.format_number(link['gb_per_second'])} GB/s in each direction, "
            f"{tables.format_number(link['microseconds'])} us ({link['source']}). All GPUs are taken to have "
            "this link, also those beyond one host.",
            *filter(None, [scaling_results.error_of_model(rows)]),
        )
        for scaling, (header, body) in on_paper.items():
            if body:
                report.table(header, body, title=f"{scaling} scaling: efficiency by the model")
    cells = measured["cells"]
    missing = [(place(cell), job_runner.reason(cell)) for cell in cells if cell["status"] != "ok"]
    missing += [(place(cell), f"no communication: {cell['trace_problem']}") for cell in cells if "trace_problem" in cell]
    missing += [line.partition(": ")[::2] for line in measured["left_out"]]
    job_runner.not_measured(report, measured, missing)
    return report


def figure(measured: Scaling, rows: list[Row], title: str) -> "plots.Figure":
    """Efficiency in weak and in strong scaling: points were measured, dashed lines are the model."""
    result = plots.new(10, 4.6)
    result.suptitle(f"Scaling: {title}".replace("; ", "\n"), fontsize=10)
    for axes, scaling in zip(result.subplots(1, 2, sharey=True), ("weak", "strong"), strict=True):
        by_model = scaling_results.extrapolate(measured, scaling)
        for i, (model, form) in enumerate(scaling_results.pairs(measured)):
            own = [row for row in rows if (row["scaling"], row["model"], row["parallel"]) == (scaling, model, form)]
            points = {row["processes"]: 100 * row["efficiency"] for row in own if row["efficiency"]}
            style = plots.style(i)
            axes.plot([*points], [*points.values()], linestyle="", label=f"{model}, {form}: measured", **style)
            if line := by_model.get((model, form)):
                values = [100 * efficiency for efficiency in line.values()]
                axes.plot([*line], values, "--", color=style["color"], label=f"{model}, {form}: model")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        on_cpu = measured["device"] and measured["device"]["kind"] == "cpu"
        axes.set(title=f"{scaling} scaling", xlabel="processes" if on_cpu else "GPUs", ylabel="efficiency, %")
        axes.set_ylim(bottom=0)
        axes.label_outer()
        axes.grid(True, color="0.9")
    handles, labels = result.axes[0].get_legend_handles_labels()
    if labels:
        result.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
    return result
