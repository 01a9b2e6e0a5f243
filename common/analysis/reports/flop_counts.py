"""What the FLOP counters said beside what the clock said: flops_profile.json, mfu_analysis.csv, and the same as text.

flops_profile.json, schema "tiny-llama-flops/1":

    counts    rows of counter, forward, backward, step (FLOPs of one training step); the first row is the reference
    parts     forward FLOPs by part of the model: causal (needed) and full (executed by code that masks)
    run       the run's record, schema "tiny-llama-run/1"
"""

from pathlib import Path
from typing import Any

from common.analysis.formulas import flops
from common.analysis.output import tables
from common.config import ModelConfig
from common.errors import UsageError
from common.files import read_json, write_json, write_text

SCHEMA = "tiny-llama-flops/1"
FOLDER = Path("flops_analysis")
REFERENCE, EXECUTED = "formula, causal", "formula, full S x S"


def write(folder: Path, counted: dict[str, dict[str, int]], run: dict[str, Any]) -> list[Path]:
    """Writes both files into `folder`.

    Args:
        counted: from `common.training.flop_counters.count`: by counter, FLOPs of forward and backward.
        run: the run's record.
    """
    config, training = ModelConfig(**run["model"]), run["training"]
    shape = (config, training["batch_size"], training["sequence_length"])
    formulas = {REFERENCE: flops.training_step(*shape), EXECUTED: flops.training_step(*shape, causal=False)}
    rows = [
        {
            "counter": counter,
            "forward": count["forward"],
            "backward": count["backward"],
            "step": count["forward"] + count["backward"],
        }
        for counter, count in (formulas | counted).items()
    ]
    parts = {"causal": flops.forward(*shape), "full": flops.forward(*shape, causal=False)}
    profile = {"schema": SCHEMA, "counts": rows, "parts": parts, "run": run}
    paths = [folder / "flops_profile.json", folder / "mfu_analysis.csv"]
    write_json(paths[0], profile)
    write_text(paths[1], tables.csv_text(*mfu_rows(profile)))
    return paths


def read(path: Path) -> dict[str, Any]:
    """flops_profile.json; a bare file name that is not here is looked for in ./flops_analysis.

    Raises:
        UsageError: there is no such file, or it is not one of these.
    """
    found = path if path.exists() or path.name != str(path) else FOLDER / path
    if not found.exists():
        raise UsageError(f"no {path} here or in {FOLDER}/: run without --analyze-results first to write it")
    return read_json(found, SCHEMA)


def mfu_rows(profile: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Per counter: GFLOP a step, TFLOP/s at the run's median step time, and % of the run's peak (None if unknown)."""
    run = profile["run"]
    seconds, peak = run["step_ms"]["median"] / 1e3, run["mfu"] and run["mfu"]["peak_flops_per_second"]
    header = ["counter", "forward GFLOP", "backward GFLOP", "step GFLOP", "of reference", "TFLOP/s", "% of peak"]
    reference = profile["counts"][0]["step"]
    return header, [
        [row["counter"], row["forward"] / 1e9, row["backward"] / 1e9, row["step"] / 1e9, row["step"] / reference,
         row["step"] / seconds / 1e12, 100 * row["step"] / seconds / peak if peak else None]
        for row in profile["counts"]
    ]  # fmt: skip


def text(profile: dict[str, Any]) -> str:
    """Both tables, and in words what the difference between the counters is."""
    run, parts = profile["run"], profile["parts"]
    total = parts["causal"]["total"]
    by_part = [
        [part, parts["causal"][part] / 1e9, parts["full"][part] / 1e9, 100 * parts["causal"][part] / total]
        for part in parts["causal"]
    ]
    peak = run["mfu"]
    lines = [
        f"{run['version']}, {run['device']['name']}, {run['precision']['compute']}, batch {run['training']['batch_size']}, "
        f"sequence {run['training']['sequence_length']}: median step {run['step_ms']['median']:.2f} ms, "
        + (
            f"peak {peak['peak_flops_per_second'] / 1e12:.3g} TFLOP/s ({peak['peak_source']})"
            if peak
            else "peak unknown: add --measure-peak"
        ),
        "",
        tables.text(*mfu_rows(profile)),
        "",
        "forward pass by part",
        tables.text(["part", "causal GFLOP", "full GFLOP", "% (causal)"], by_part),
        "",
        "Utilisation (MFU) is the first row: the work that the mathematics needs. The full count adds the masked half of the",
        "S x S pairs. FlopCounterMode counts the matrix products that ran, and of a fused attention kernel all S x S pairs too,",
        "whether or not it leaves the masked ones out; in the backward pass it adds the scores, which such a kernel computes",
        "again. A kernel that it does not know counts as nothing, unless its version says what it computes. DeepSpeed watches",
        "the forward pass only, with S x S pairs (its backward is twice that, by rule), and adds silu, a function it patches.",
        "Both watch the model without torch.compile.",
    ]
    if not any(row["counter"] == "DeepSpeed" for row in profile["counts"]):
        lines.append("DeepSpeed is not installed here, so its row is missing.")
    return "\n".join(lines)
