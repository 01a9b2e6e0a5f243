"""FLOP counts of a training step beside its time: flops_profile.json, mfu_analysis.csv, and a report."""

from pathlib import Path
from typing import cast

from common import files
from common.analysis.formulas import flops
from common.analysis.output import run_facts, tables
from common.analysis.output.report import Report
from common.config import ModelConfig
from common.errors import UsageError
from common.records.flops_file import SCHEMA, FlopCounts
from common.records.run_record import TimedRun

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


def write(folder: Path, counted: dict[str, dict[str, int]], run: TimedRun) -> list[Path]:
    """Writes both files into `folder`.

    Args:
        counted: from `common.training.flop_counters.count`: by counter, FLOPs of forward and backward.
        run: the record of the run.
    """
    config, training = ModelConfig(**run["model"]), run["training"]
    shape = (config, training["batch_size"], training["sequence_length"])
    formulas = {REFERENCE: flops.training_step(*shape), EXECUTED: flops.training_step(*shape, causal=False)}
    counts = [
        {
            "counter": counter,
            **{name: count[name] for name in ("forward", "backward")},
            "step": count["forward"] + count["backward"],
        }
        for counter, count in (formulas | counted).items()
    ]
    parts = {"causal": flops.forward(*shape), "full": flops.forward(*shape, causal=False)}
    profile = cast(FlopCounts, {"schema": SCHEMA, "counts": counts, "parts": parts, "run": run})
    result = report(profile)
    result.json("flops_profile", profile)
    return result.write(folder, "flops", ("json", "csv"))


def read(path: Path) -> FlopCounts:
    """flops_profile.json; a bare file name that is not here is looked for in ./flops_analysis.

    Raises:
        UsageError: there is no such file, or it is damaged or of another schema.
    """
    found = path if path.exists() or path.name != str(path) else FOLDER / path
    if not found.exists():
        raise UsageError(f"no {path} here or in {FOLDER}/: run without --analyze-results first to write it")
    return files.read(found, FlopCounts)


def mfu_rows(profile: FlopCounts) -> tables.Table:
    """Per counter: GFLOP a step, TFLOP/s at the run's median step time, and % of two peaks (None where one is not known)."""
    run = profile["run"]
    seconds, measured = run["step_ms"]["median"] / 1e3, run["ceilings"] and run["ceilings"]["flops_per_second"]
    peaks = run_facts.peak_flops(run), measured
    header = ["counter", "forward GFLOP", "backward GFLOP", "step GFLOP", "of reference", "TFLOP/s"]
    header += ["% of peak", "% of measured GEMM"]
    reference = profile["counts"][0]["step"]
    return header, [
        [row["counter"], row["forward"] / 1e9, row["backward"] / 1e9, row["step"] / 1e9, row["step"] / reference,
         row["step"] / seconds / 1e12, *(100 * row["step"] / seconds / peak if peak else None for peak in peaks)]
        for row in profile["counts"]
    ]  # fmt: skip


def report(profile: FlopCounts) -> Report:
    """FLOPs by counter and by part of the model, and why the counters differ; it writes mfu_analysis.csv."""
    run, parts, peak = profile["run"], profile["parts"], run_facts.peak_flops(profile["run"])
    needed, executed = cast(dict[str, int], parts["causal"]), cast(dict[str, int], parts["full"])
    by_part = [[part, count / 1e9, executed[part] / 1e9, 100 * count / needed["total"]] for part, count in needed.items()]
    known = f"peak {peak / 1e12:.3g} TFLOP/s (data sheet)" if peak else "the device's peak is not listed"
    median = tables.format_time(run["step_ms"]["median"])
    result = Report("FLOPs of a training step")
    result.text(f"{run['version']}, {run_facts.describe(run)}; median step {median}, {known}.")
    result.table(*mfu_rows(profile), title="By counter", csv="mfu_analysis")
    result.table(["part", "causal GFLOP", "full GFLOP", "% (causal)"], by_part, title="Forward pass by part")
    result.text(HOW_TO_READ)
    if not any(row["counter"] == "DeepSpeed" for row in profile["counts"]):
        result.text("DeepSpeed is not installed here, so its row is missing.")
    return result
