"""The model on paper of a scaling study: predicts the step on n processes from the step on one, and a link.

The formulas are those of `analysis.formulas.data_parallel`. A collective takes its latencies, and its bytes over the bandwidth of
the link. All its pieces but the last overlap with the pass that they run beside, as far as they fit, and the rest is exposed.
This module gives the formulas what was measured:

    the step on one process    its median, which forward pass, backward pass and update share as they share its profile
    the link                   the one of the study (`link`)
    the collectives            their kinds and bytes in the traces, where these show them, or else those of the form on paper
"""

from common.analysis.formulas import data_parallel
from common.records.scaling_file import PHASES, Scaling, one_process, pairs, share, step_of

EXTRAPOLATED = [2**i for i in range(13)]  # GPUs


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
