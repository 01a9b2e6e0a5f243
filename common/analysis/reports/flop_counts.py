"""FLOP counts of a training step beside its time: flops_profile.json, mfu_analysis.csv, and a report.

flops_profile.json, schema "tiny-llama-flops/1":

    counts    rows of counter, forward, backward, step (FLOPs of one training step); the first row is the reference
    parts     forward FLOPs by part of the model: causal (needed) and full (executed by code that masks)
    run       the record of the run, schema "tiny-llama-run/1"
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from common import files
from common.analysis.formulas import flops
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.analysis.profiles import run_record
from common.analysis.profiles.run_record import TimedRun
from common.config import ModelConfig
from common.errors import UsageError

from pydantic import Field, PositiveInt
from typing_extensions import TypedDict

SCHEMA = "tiny-llama-flops/1"
FOLDER = Path("flops_analysis")
REFERENCE, EXECUTED = "formula, causal", "formula, full S x S"
HOW_TO_READ = (
    "Utilisation (MFU) is the first row: the work that the mathematics needs. The full count adds the masked half of the S "
    "x S pairs. FlopCounterMode counts the matrix products that ran. Of a fused attention kernel it counts all S x S pairs, "
    "whether or not the kernel leaves the masked pairs out, and in the backward pass also the scores, which such a kernel "
    "computes again. A kernel that it does not know counts as zero unless its version reports what it computes. DeepSpeed "
    "watches the forward pass only, with S x S pairs; its backward count is twice that by rule. It adds silu, a function "
    "that it patches. Both counters watch the model without torch.compile."
)


class Count(TypedDict):
    counter: str
    forward: PositiveInt
    backward: PositiveInt
    step: PositiveInt


class Parts(TypedDict):
    projections: PositiveInt
    attention: PositiveInt
    mlp: PositiveInt
    head: PositiveInt
    total: PositiveInt


class CausalAndFull(TypedDict):
    causal: Parts
    full: Parts


class FlopCounts(TypedDict):
    schema: Literal[SCHEMA]
    counts: Annotated[list[Count], Field(min_length=1)]
    parts: CausalAndFull
    run: TimedRun


def write(folder: Path, counted: dict[str, dict[str, int]], run: dict[str, Any]) -> list[Path]:
    """Writes both files into `folder`.

    Args:
        counted: from `common.training.flop_counters.count`: by counter, FLOPs of forward and backward.
        run: the record of the run.
    """
    config, training = ModelConfig(**run["model"]), run["training"]
    shape = (config, training["batch_size"], training["sequence_length"])
    formulas = {REFERENCE: flops.training_step(*shape), EXECUTED: flops.training_step(*shape, causal=False)}
    pairs = {counter: (count["forward"], count["backward"]) for counter, count in (formulas | counted).items()}
    counts = [
        {"counter": counter, "forward": forward, "backward": backward, "step": forward + backward}
        for counter, (forward, backward) in pairs.items()
    ]
    parts = {"causal": flops.forward(*shape), "full": flops.forward(*shape, causal=False)}
    profile = {"schema": SCHEMA, "counts": counts, "parts": parts, "run": run}
    result = report(profile)
    result.json("flops_profile", profile)
    return result.write(folder, "flops", ("json", "csv"))


def read(path: Path) -> dict[str, Any]:
    """flops_profile.json; a bare file name that is not here is looked for in ./flops_analysis.

    Raises:
        UsageError: there is no such file, or it is damaged or of another schema.
    """
    found = path if path.exists() or path.name != str(path) else FOLDER / path
    if not found.exists():
        raise UsageError(f"no {path} here or in {FOLDER}/: run without --analyze-results first to write it")
    return files.read(found, FlopCounts)


def mfu_rows(profile: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Per counter: GFLOP a step, TFLOP/s at the run's median step time, and % of two peaks (None where one is not known)."""
    run = profile["run"]
    seconds, measured = run["step_ms"]["median"] / 1e3, run["ceilings"] and run["ceilings"]["flops_per_second"]
    peaks = run_record.peak_flops(run), measured
    header = ["counter", "forward GFLOP", "backward GFLOP", "step GFLOP", "of reference", "TFLOP/s"]
    header += ["% of peak", "% of measured GEMM"]
    reference = profile["counts"][0]["step"]
    return header, [
        [row["counter"], row["forward"] / 1e9, row["backward"] / 1e9, row["step"] / 1e9, row["step"] / reference,
         row["step"] / seconds / 1e12, *(100 * row["step"] / seconds / peak if peak else None for peak in peaks)]
        for row in profile["counts"]
    ]  # fmt: skip


def report(profile: dict[str, Any]) -> Report:
    """FLOPs by counter and by part of the model, and why the counters differ; it writes mfu_analysis.csv."""
    run, parts, peak = profile["run"], profile["parts"], run_record.peak_flops(profile["run"])
    total = parts["causal"]["total"]
    by_part = [
        [part, parts["causal"][part] / 1e9, parts["full"][part] / 1e9, 100 * parts["causal"][part] / total]
        for part in parts["causal"]
    ]
    known = f"peak {peak / 1e12:.3g} TFLOP/s (data sheet)" if peak else "the device's peak is not listed"
    median = tables.format_time(run["step_ms"]["median"])
    result = Report("FLOPs of a training step")
    result.text(f"{run['version']}, {run_record.describe(run)}; median step {median}, {known}.")
    result.table(*mfu_rows(profile), title="By counter", csv="mfu_analysis")
    result.table(["part", "causal GFLOP", "full GFLOP", "% (causal)"], by_part, title="Forward pass by part")
    result.text(HOW_TO_READ)
    if not any(row["counter"] == "DeepSpeed" for row in profile["counts"]):
        result.text("DeepSpeed is not installed here, so its row is missing.")
    return result
