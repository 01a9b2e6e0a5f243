"""Tables made from the measured runs in results/<device>/, for the documents.

    v1_<preset>.json           a run's record (schema tiny-llama-run/1)
    v1_<preset>_profile.json   a profile of the same configuration (schema tiny-llama-profile/1)

`results/measure_v1.sh` writes both.

    compare_<preset>_<precision>_<what>.json    runs of two versions, for what = v1, v2 or v2_compiled
    v2_ablation_<preset>_<precision>.json       from `fusion_ablation_study.py --all-combinations` (schema tiny-llama-ablation/1)
    benchmark_<preset>_<precision>.json         from `benchmark_suite.py` (schema tiny-llama-benchmark/1)

`results/measure_versions.sh` writes those, and sequence_memory.json.

    sequence_memory.json    from `analyze_sequence_memory.py` (schema tiny-llama-sequence-memory/1)
    curve_v*.json           200 steps of `tiny` in fp32, in each version's folder: `--num-steps 200 --metrics-out FILE`
    stages/                 of the performance-debugging exercise's run_all_stages.sh; its compare_stages.py reads it
    trial_*.json            Version 1 with one setting changed; LOG.md has the commands
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.analysis.comparisons import sequence_memory
from common.analysis.output import tables
from common.analysis.profiles import step_profile
from common.analysis.profiles.run_record import SCHEMA as RUN_SCHEMA
from common.config import PRESETS
from common.errors import UsageError
from common.files import read_json
from common.studies import ablation, benchmark


def _each(folders: tuple[Path, ...], suffix: str, schema: str) -> Iterator[dict[str, Any]]:
    """Files of the folders that exist, in the order of the presets."""
    for folder in folders:
        found = [folder / f"v1_{preset}{suffix}.json" for preset in PRESETS]
        found = [path for path in found if path.exists()]
        if not found:
            raise UsageError(f"no v1_*{suffix}.json in {folder}: measure with results/measure_v1.sh {folder.name}")
        for path in found:
            yield read_json(path, schema)


def _device(run: dict[str, Any]) -> str:
    threads = run["device"].get("threads")
    return f"{run['device']['name']}, {threads} threads" if threads else run["device"]["name"]


def _named(run: dict[str, Any]) -> str:
    return f"{run['training']['preset']}, {_device(run)}"


def training(*folders: Path) -> str:
    """One row a run: shape, step time, throughput, memory, rate, utilisation and loss."""
    rows = []
    for run in _each(folders, "", RUN_SCHEMA):
        step, last = run["step_ms"], run["loss"]["all"][-20:]
        rows.append([
            run["training"]["preset"], _device(run), run["precision"]["compute"],
            f"{run['training']['batch_size']} x {run['training']['sequence_length']}", run["parameters"] / 1e6,
            step["median"], f"{tables.figure(step['p20'])} to {tables.figure(step['p80'])}", run["tokens_per_second"],
            f"{tables.figure(run['memory']['peak_mib'])} ({run['memory']['kind']})", run["flops_per_second"] / 1e12,
            f"{tables.figure(100 * run['mfu']['utilization'])} of the {run['mfu']['peak_source']}" if run["mfu"] else None,
            f"{run['loss']['all'][0]:.2f} to {sum(last) / len(last):.2f} in {len(run['loss']['all'])} steps",
        ])  # fmt: skip
    header = ["preset", "device", "precision", "B x S", "M parameters", "ms/step", "p20 to p80", "tokens/s", "peak MiB",
              "TFLOP/s", "MFU %", "loss"]  # fmt: skip
    return tables.markdown(header, rows)


def phases(*folders: Path) -> str:
    """Forward, backward and optimizer of each run, in ms, timed apart."""
    rows = [
        [_named(run), *(run["phases_ms"][phase]["median"] for phase in ("forward", "backward", "optimizer"))]
        for run in _each(folders, "", RUN_SCHEMA)
    ]
    return tables.markdown(["run", "forward ms", "backward ms", "optimizer ms"], rows)


def spans(*folders: Path) -> str:
    """Where a profiled step's time goes, in % of its wall time: GPU kernels, or CPU operators, by span."""
    columns: dict[str, dict[str, float]] = {}
    for profile in _each(folders, "_profile", step_profile.SCHEMA):
        wall = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3
        shares = {span: 100 * sum(by_phase.values()) / wall for span, by_phase in step_profile.span_milliseconds(profile).items()}
        idle = (
            100 * (1 - profile["device_busy_us"] / sum(profile["step_us"])) if profile["kernels"] else 100 - sum(shares.values())
        )
        columns[_named(profile["run"])] = shares | {"GPU idle, or outside operators": idle}
    names = list(dict.fromkeys(name for shares in columns.values() for name in shares if not name.startswith("GPU idle")))
    rows = [
        [name, *(shares.get(name, 0.0) for shares in columns.values())] for name in [*names, "GPU idle, or outside operators"]
    ]
    return tables.markdown(["% of step", *columns], rows)


def ceilings(*folders: Path) -> str:
    """What each device was measured to do at best."""
    found = {}
    for run in _each(folders, "", RUN_SCHEMA):
        found.setdefault(_device(run), run["ceilings"])
    rows = [
        [name, c["precision"], c["flops_per_second"] / 1e12, c["bytes_per_second"] / 1e9, c["operation_seconds"] * 1e6]
        for name, c in found.items()
    ]
    return tables.markdown(["device", "precision", "GEMM TFLOP/s", "copy GB/s", "one small operation, us"], rows)


COMPARED = {"v1": "Version 1", "v2": "Version 2", "v2_compiled": "Version 2, torch.compile", "v3": "Version 3"}


def comparison(folder: Path) -> str:
    """The versions at each preset and precision: step time, ratio to Version 1, memory, loss."""
    rows = []
    for preset in PRESETS:
        for precision in ("fp32", "bf16"):
            paths = {what: folder / f"compare_{preset}_{precision}_{what}.json" for what in COMPARED}
            runs = {what: read_json(path, RUN_SCHEMA) for what, path in paths.items() if path.exists()}
            if runs and "v1" not in runs:
                raise UsageError(f"{folder} lacks {paths['v1'].name}, with which the others are compared")
            for what, run in runs.items():
                step, first = run["step_ms"], runs["v1"]["step_ms"]["median"]
                spread = f"{tables.figure(step['p20'])} to {tables.figure(step['p80'])}"
                rows.append([
                    preset, precision, COMPARED[what], step["median"], spread,
                    f"{first / step['median']:.2f}x", run["memory"]["peak_mib"], f"{run['loss']['all'][-1]:.3f}",
                ])  # fmt: skip
    if not rows:
        raise UsageError(f"no compare_*.json in {folder}: measure with results/measure_versions.sh {folder.name}")
    header = ["preset", "precision", "run", "ms/step", "p20 to p80", "against Version 1", "peak MiB", "last loss"]
    return tables.markdown(header, rows)


def trials(folder: Path) -> str:
    """Version 1 at the default configuration, and with another learning rate or initialisation (trial_*.json)."""
    paths = [folder / "v1_tiny.json", *sorted(folder.glob("trial_*.json"))]
    rows = []
    for run in (read_json(path, RUN_SCHEMA) for path in paths):
        last, std = run["loss"]["all"][-20:], run["model"]["initializer_range"]
        rows.append([run["training"]["learning_rate"], std or "sqrt(2 / (5 D))", f"{sum(last) / len(last):.3f}", _device(run)])
    return tables.markdown(["learning rate", "standard deviation of the weights", "loss (last 20 steps)", "device"], rows)


def curves(folder: Path) -> str:
    """How far the losses of the other versions come away from Version 1's (curve_v*.json)."""
    runs = {path.stem.removeprefix("curve_"): read_json(path, RUN_SCHEMA) for path in sorted(folder.glob("curve_v*.json"))}
    if len(runs) < 2 or "v1" not in runs:
        raise UsageError(
            f"{folder} needs curve_v1.json and that of another version: runs with --num-steps 200 --metrics-out FILE"
        )
    expected = runs.pop("v1")["loss"]["all"]
    far = {
        f"{COMPARED[name]}, {_device(run)}": [abs(a - b) for a, b in zip(run["loss"]["all"], expected, strict=True)]
        for name, run in runs.items()
    }
    rows = [[step, *(f"{max(each[:step]):.1e}" for each in far.values())] for step in range(20, len(expected) + 1, 20)]
    return tables.markdown(["largest difference up to step", *far], rows)


def fusions(folder: Path) -> str:
    """The combinations of fusions at tiny in fp32."""
    return tables.markdown(*ablation.combination_table(read_json(folder / "v2_ablation_tiny_fp32.json", ablation.SCHEMA)))


def _suite(table: Callable[[dict[str, Any]], tuple[list[str], list[list[object]]]]) -> Callable[[Path], str]:
    """A table of one benchmark_*.json, below a line that says on what it was measured."""

    def made(path: Path) -> str:
        measured = read_json(path, benchmark.SCHEMA)
        return f"{benchmark.conditions(measured)}\n\n{tables.markdown(*table(measured))}"

    return made


def lengths(path: Path) -> str:
    """Peak memory over the sequence length, and the parabolas through it."""
    runs = sequence_memory.load(path)
    both = (tables.markdown(*table(runs)) for table in (sequence_memory.table, sequence_memory.fit_table))
    return "\n".join([f"{sequence_memory.conditions(runs)}\n", *both])


TABLES: dict[str, Callable[..., str]] = {
    "sequence_memory": lengths,
    "suite_throughput": _suite(benchmark.throughput_table),
    "suite_memory": _suite(benchmark.memory_table),
    "suite_scaling": _suite(benchmark.scaling_table),
    "suite_accuracy": _suite(benchmark.accuracy_table),
    "ablation": fusions,
    "curves": curves,
    "trials": trials,
    "comparison": comparison,
    "training": training,
    "phases": phases,
    "spans": spans,
    "ceilings": ceilings,
}
