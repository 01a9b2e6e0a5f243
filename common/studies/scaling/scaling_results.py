"""The numbers that follow from what a scaling study measured, beside those of the model on paper, and their tables.

Efficiency is a job's throughput over n times that of one process, at the same batch of a process (weak scaling) or of the job
(strong scaling).

The model on paper predicts the step on n processes by the formulas of `analysis.formulas.data_parallel`. It gives them the median
step on one process, which forward pass, backward pass and update share as they share its profile; the link of the study (`link`);
and kinds and bytes of the collectives in the traces, where these show them, or else those of the form on paper.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

from common.analysis.formulas import data_parallel
from common.analysis.output import tables
from common.analysis.output.tables import Table
from common.records.study_files import PHASES, Scaling, ScalingCell, Split

import pandas

MULTICAST = "NCCL_NVLS_ENABLE"
EXTRAPOLATED = [2**i for i in range(13)]  # GPUs
COLUMNS = (
    "scaling", "model", "parallel", "processes", "batch_size", "status", "ms", "p20", "p80", "repeats", "tokens_per_second",
    "efficiency", "peak_mib", *Split.__annotations__, "model_ms", "model_efficiency", "model_error",
)  # fmt: skip
NAMED = ["version", "form", "processes", "B of each"]  # the first columns of each table


def place(cell: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, ddp, 2 x 8"."""
    return f"{cell['model']}, {cell['parallel'] or 'one process'}, {cell['processes']} x {cell['batch_size']}"


def step_of(cell: ScalingCell) -> float:
    """Milliseconds: the median of the jobs' medians."""
    return median(run["step_ms"]["median"] for run in cell["runs"])


def pairs(measured: Scaling) -> list[tuple[str, str]]:
    """Each model and form that has a cell."""
    return list(dict.fromkeys((cell["model"], cell["parallel"]) for cell in measured["cells"] if cell["parallel"]))


def share(scaling: str, processes: int) -> float:
    """The share of one process's batch that each process has, in "weak" or in "strong" scaling."""
    return 1.0 if scaling == "weak" else 1 / processes


def whole_batch(measured: Scaling, scaling: str) -> int:
    """The batch size of one process, against which the scaling is."""
    return measured["batch_size" if scaling == "weak" else "global_batch_size"]


def one_process(measured: Scaling, scaling: str, model: str) -> ScalingCell | None:
    """The cell of one process that the scaling is against, if it was measured."""
    wanted = (model, 1, whole_batch(measured, scaling), "ok")
    cells = measured["cells"]
    return next((c for c in cells if (c["model"], c["processes"], c["batch_size"], c["status"]) == wanted), None)


Row = dict[str, Any]  # by the names in COLUMNS


def results(measured: Scaling) -> list[Row]:
    """COLUMNS of each cell in weak scaling, then in strong scaling (None if not measured); communication is the ranks' mean."""
    rows = []
    for scaling in ("weak", "strong"):
        for cell in measured["cells"]:
            n = cell["processes"]
            if cell["batch_size"] * (1 if scaling == "weak" else n) != whole_batch(measured, scaling):
                continue
            known = {name: value for name, value in cell.items() if name in COLUMNS}
            row: Row = dict.fromkeys(COLUMNS) | known | {"scaling": scaling}
            paper = predict(measured, scaling, cell["model"], cell["parallel"], n) if cell["parallel"] else None
            row |= dict(zip(("model_ms", "model_efficiency"), paper or (None, None), strict=True))
            if cell["status"] == "ok":
                row |= {name: median(run["step_ms"][name] for run in cell["runs"]) for name in ("p20", "p80")}
                row |= {"ms": step_of(cell), "repeats": len(cell["runs"])}
                row["peak_mib"] = median(run["peak_mib"] for run in cell["runs"])
                row["tokens_per_second"] = n * cell["batch_size"] * measured["sequence_length"] / row["ms"] * 1e3
                one = one_process(measured, scaling, cell["model"])
                row["efficiency"] = one and data_parallel.efficiency(step_of(one), row["ms"], share(scaling, n))
                row["model_error"] = paper and paper[0] / row["ms"] - 1
                if ranks := cell.get("ranks"):
                    row |= {str(name): value for name, value in pandas.DataFrame(ranks).mean().items() if name in COLUMNS}
            rows.append(row)
    return rows


def transfers(measured: Scaling, model: str, form: str, parameters: int) -> list[data_parallel.Transfer]:
    """The collectives of a step: as the traces of the fewest processes show them, or as the form has them on paper."""
    for cell in measured["cells"]:  # fewest processes first
        found = [
            data_parallel.Transfer(each["kind"], each["bytes"], each["count"], each["beside"])
            for each in cell.get("collectives", []) if each["bytes"] is not None and each["kind"] in data_parallel.KINDS
        ]  # fmt: skip
        if (cell["model"], cell["parallel"]) == (model, form) and found and len(found) == len(cell["collectives"]):
            return found
    return data_parallel.transfers(form, parameters, measured["model"]["num_layers"])


def predict(measured: Scaling, scaling: str, model: str, form: str, processes: int) -> tuple[float, float] | None:
    """Milliseconds of a step and efficiency by the model on paper, if the step on one process and a link are known."""
    one = one_process(measured, scaling, model)
    if not one or "shares" not in one or not measured["link"]:
        return None
    whole, part = step_of(one), share(scaling, processes)
    step = data_parallel.Step(*(whole * one["shares"].get(phase, 0.0) for phase in PHASES))
    path = data_parallel.Link(measured["link"]["gb_per_second"], measured["link"]["microseconds"])
    moved = transfers(measured, model, form, one.get("parameters", 1))
    ms = data_parallel.step_ms(form, moved, step, processes, path, part)
    return (ms, data_parallel.efficiency(whole, ms, part)) if ms else None


def extrapolate(measured: Scaling, scaling: str) -> dict[tuple[str, str], dict[int, float]]:
    """Efficiency by the number of GPUs, for each model and form that the model on paper can predict."""
    counts = [n for n in EXTRAPOLATED if scaling == "weak" or measured["global_batch_size"] % n == 0]
    found = {pair: {n: predict(measured, scaling, *pair, n) for n in counts} for pair in pairs(measured)}
    return {pair: {n: value[1] for n, value in values.items() if value} for pair, values in found.items() if all(values.values())}


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"


def _named(row: Row) -> list[object]:
    """NAMED of a row."""
    return [row["model"], row["parallel"] or "one process", row["processes"], row["batch_size"]]


def step_table(rows: list[Row]) -> Table:
    """A row for each measured cell: step time, throughput, efficiency, memory, communication, and the model's time and error."""
    rows = [row for row in rows if row["ms"]]
    unit, factor = tables.time_unit(max((row["ms"] for row in rows), default=1.0))
    body: list[list[object]] = []
    for row in rows:
        communication = [row[name] for name in ("exposed_ms", "exposed_waiting_ms", "overlapped_ms")]
        body.append([
            *_named(row), factor * row["ms"], tables.spread(row, factor), row["tokens_per_second"], _percent(row["efficiency"]),
            row["peak_mib"], *communication, row["model_ms"] and factor * row["model_ms"], _percent(row["model_error"]),
        ])  # fmt: skip
    columns = [*NAMED, f"{unit}/step", "p20 to p80", "tokens/s", "efficiency", "peak MiB", "exposed communication, ms"]
    return tables.filled([*columns, "of it waiting, ms", "overlapped, ms", f"on paper, {unit}", "its error"], body)


def communication_table(rows: list[Row]) -> Table:
    """A row for each profiled cell: milliseconds of communication in a step, the mean of the ranks."""
    names = list(Split.__annotations__)
    body = [[*_named(row), *(row[name] for name in names)] for row in rows if row["communication_ms"] is not None]
    columns = ["communication", "overlapped", "exposed", "waiting", "moving", "exposed waiting"]
    return [*NAMED, *(f"{name}, ms" for name in columns)], body


def model_table(measured: Scaling, scaling: str) -> Table:
    """A row for each number of GPUs, a column for each model and form: the efficiency that the model on paper predicts."""
    found = extrapolate(measured, scaling)
    counts = next(iter(found.values()), {})  # the same for all
    body = [[n, *(_percent(efficiencies[n]) for efficiencies in found.values())] for n in counts]
    return ["GPUs", *(f"{model}, {form}: model" for model, form in found)], body


def multicast(measured: Scaling) -> list[str]:
    """Whether NVLink multicast was off, in one sentence; nothing where there is no NVLink: on a CPU, and on AMD's GPUs."""
    if not measured["device"] or measured["device"]["kind"] != "cuda":
        return []
    value = measured["variables"].get(MULTICAST)
    if value is None:
        return [f"{MULTICAST} was not set: NCCL decides about NVLink multicast."]
    return [f"NVLink multicast was {'off' if value == '0' else 'left to NCCL'} ({MULTICAST}={value})."]


def error_of_model(rows: list[Row]) -> str | None:
    """How far the model was from what was measured, in one sentence."""
    errors = [(abs(row["model_error"]), row) for row in rows if row["model_error"] is not None]
    if not errors:
        return None
    worst, row = max(errors, key=lambda error: error[0])
    middle = median(error for error, _ in errors)
    return (
        f"The step time of the model on paper is off by {_percent(middle)} at the median and by {_percent(worst)} at most "
        f"({row['scaling']}, {place(row)})."
    )
