"""The report on two versions' tensors: how far each lies from the baseline's, and a verdict."""

from typing import NamedTuple

from tracepage.show.report import Report


class TensorError(NamedTuple):
    """A tensor by its error against the baseline, max |a - b| / max |a|."""

    name: str
    largest: float  # element of the baseline
    error: float  # of the optimized version
    rounding: float  # of the baseline itself in that version's number format, against float64


def render_accuracy(
    errors: list[TensorError], precision: str, tolerance: float
) -> tuple[Report, bool]:
    """The table and the verdict, and whether every error is within the tolerance.

    Args:
        errors: the largest first.
        precision: of the optimized version, such as "bf16".
    """
    worst = errors[0]
    past = sum(not tensor.error <= tolerance for tensor in errors)
    verdict = "PASS"
    count = f"all {len(errors)} tensors are within"
    if past:
        verdict = "FAIL"
        count = f"{past} of {len(errors)} tensors exceed"
    report = Report("Numerical accuracy")
    header = ["tensor", "max |baseline|", "relative error"]
    report.table([*header, f"baseline in {precision} against float64"], errors)
    report.text(
        f"{verdict}: the worst tensor is {worst.name}, relative error {worst.error:.2g} "
        f"(rounding alone: {worst.rounding:.2g}); {count} the tolerance {tolerance:g}"
    )
    return report, not past
