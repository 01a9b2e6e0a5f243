"""Tables that join the files of several runs or studies in results/<device>/. The scripts in results/ write these files:

    measure_v1.sh        v1_<preset>.json                           the record of a run (v1: any version)
                         v1_<preset>_profile.json.gz                a profile of the same configuration
    measure_versions.sh  compare_<preset>_<precision>_<name>.json   runs of all versions; the first by name is the reference
                         v2_ablation_<preset>_<precision>.json      all combinations of a version's fusions
                         benchmark_<preset>_<precision>.json        models over a grid of shapes
                         captured_<preset>_<precision>.json         the same, of models with and without a captured step
                         peers_<preset>_<precision>.json            the same, of all versions and external baselines
                         sequence_memory.json                       peak memory over the sequence length
    measure_scaling.sh   scaling_<preset>_<precision>.json          weak and strong scaling over GPUs, beside a model on paper

These come from training runs with `--metrics-out`: curve_<version>.json, with one `--num-steps` in each version's folder, and
trial_*.json, the first version with one setting changed (LOG.md has the commands). The tables of one file are those of its report
(`common.documents.sections`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from common.analysis.comparisons import growth
from common.analysis.output import run_facts, tables
from common.analysis.output.tables import format_number
from common.analysis.reports import bandwidth
from common.config import PRESETS
from common.errors import UsageError
from common.records import benchmark_file, run_record, scaling_file, step_profile
from common.records.benchmark_file import Benchmark, Cell
from common.records.fields import Ceilings
from common.records.run_record import TimedRun
from common.studies import known_models
from common.studies.scaling import scaling_results

import pandas

PRECISIONS = ("fp32", "bf16")
Record = Mapping[str, Any]  # of a run or a study: it has the keys of fields.Header


# -------------------------------------------------------------------------------------------------------- files and records


def find(folder: Path, pattern: str, script: str = "measure_versions.sh") -> list[tuple[str, str, Path]]:
    """Preset, precision and path of the files whose name matches `pattern`, in the order of presets, precisions and names.

    Args:
        pattern: a glob pattern in which "{preset}" and, if it has one, "{precision}" stand for their names.
        script: the one in results/ that writes such files.

    Raises:
        UsageError: there is no such file.
    """
    cases = [(preset, precision) for preset in PRESETS for precision in (PRECISIONS if "{precision}" in pattern else [""])]
    globs = [pattern.format(preset=preset, precision=precision) for preset, precision in cases]
    found = [(*case, path) for case, glob in zip(cases, globs, strict=True) for path in sorted(folder.glob(glob))]
    if not found:
        raise UsageError(f"no {globs[0]} or the like in {folder}: measure with results/{script} {folder.name}")
    return found


def baseline_runs(*folders: Path) -> Iterator[tuple[TimedRun, Path]]:
    """The record of each run that has a profile of the same configuration, and the path of that profile."""
    for folder in folders:
        for _, _, path in find(folder, "v[0-9]_{preset}.json", "measure_v1.sh"):
            yield run_record.read_timed(path), path.with_name(f"{path.stem}_profile.json.gz")


def compared(folder: Path) -> list[list[TimedRun]]:
    """The runs at each preset and precision, at least two; the first is of the same version everywhere, the reference.

    Raises:
        UsageError: there are no runs, or the reference is missing somewhere, or has nothing beside it.
    """
    files = find(folder, "compare_{preset}_{precision}_*.json")
    groups = [[run_record.read_timed(path) for *_, path in group] for _, group in groupby(files, lambda file: file[:2])]
    reference = min(runs[0]["version"] for runs in groups)
    for first, *others in groups:
        if first["version"] != reference or not others:
            case = f"{first['training']['preset']}_{first['precision']['compute']}"
            raise UsageError(f"{folder} needs compare_{case}_{reference}.json, and a run of another version beside it")
    return groups


def label(run: Record) -> str:
    """The version and the switches that its command changed, such as "Version 2, torch-compile"."""
    switched = re.findall(r"--(enable|disable)-([\w-]+)", run["command"])
    changes = (name if change == "enable" else f"no {name}" for change, name in switched)
    return ", ".join([run["version"].replace("v", "Version "), *changes])


def case(run: TimedRun) -> list[str]:
    return [run["training"]["preset"], run["precision"]["compute"]]


def rows_of(runs: Iterable[TimedRun], columns: Sequence[str]) -> list[list[object]]:
    """A row per run with these columns of `run_facts.columns`."""
    return [[run_facts.columns(run)[name] for name in columns] for run in runs]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *records: Record) -> str:
    """A Markdown table below the conditions of the records that it was made from."""
    return f"{conditions(*records)}\n\n{tables.markdown(columns, rows)}"


def conditions(*records: Record) -> str:
    """Devices, packages and dates of records in a line.

    The line has the model and the number format if all records have the same, and the command if there is one record.
    """
    facts = [run_facts.device(record) for record in records]
    for record in records:
        facts += map(" ".join, ({"torch": record["environment"]["torch"]} | record.get("packages", {})).items())
    models = (tables.letters(record["model"]) if "model" in record else "" for record in records)
    compute = (record["precision"]["compute"] for record in records)
    configurations = {", ".join(filter(None, pair)) for pair in zip(compute, models, strict=True)}
    dates = sorted(record["date"][:10] for record in records)
    facts += [*configurations][: len(configurations) == 1] + [" to ".join(dict.fromkeys([dates[0], dates[-1]]))]
    if len(records) == 1:
        facts.append(f"`{re.sub(' --(output-dir|metrics-out) [^ ]+', '', records[0]['command'])}`")
    return "; ".join(dict.fromkeys(facts))


# -------------------------------------------------------------------------------------------------------------------- runs


def training(*folders: Path) -> str:
    """A row per run: shape, step time, throughput, memory, FLOP/s, utilisation and loss."""
    columns = ["preset", "device", "precision", "B x S", "M parameters", "ms/step", "p20 to p80", "tokens/s", "peak memory",
               "TFLOP/s", "MFU %", "% of measured GEMM", "loss"]  # fmt: skip
    return tables.markdown(columns, rows_of((run for run, _ in baseline_runs(*folders)), columns))


def phases(*folders: Path) -> str:
    """A row per run: its forward pass, backward pass and optimizer in ms, timed apart."""
    columns = ["run", "forward ms", "backward ms", "optimizer ms"]
    return tables.markdown(columns, rows_of((run for run, _ in baseline_runs(*folders)), columns))


IDLE = "GPU idle, or outside operators"


def span_shares(*folders: Path) -> dict[str, dict[str, float]]:
    """By run, the share of a profiled step's wall time in each span in percent, by GPU kernels or by CPU operators; then IDLE."""
    columns = {}
    for _, path in baseline_runs(*folders):
        profile = step_profile.read(path)
        wall_ms, idle = sum(profile["step_us"]) / profile["profiled_steps"] / 1e3, step_profile.idle_percent(profile)
        shares = {span: 100 * sum(phases.values()) / wall_ms for span, phases in step_profile.span_milliseconds(profile).items()}
        shares[IDLE] = 100 - sum(shares.values()) if idle is None else idle
        columns[str(run_facts.columns(profile["run"])["run"])] = shares
    return columns


def spans(*folders: Path) -> str:
    """A column per run: the share of a profiled step's wall time in each span."""
    columns = span_shares(*folders)
    names = [*dict.fromkeys(name for shares in columns.values() for name in shares if name != IDLE), IDLE]
    rows = [[name, *(shares.get(name, 0.0) for shares in columns.values())] for name in names]
    return tables.markdown(["% of step", *columns], rows)


def ceilings(*folders: Path) -> str:
    """A row per device: the highest rates that its first run measured."""
    found: dict[str, Ceilings] = {}
    for run, _ in baseline_runs(*folders):
        if run["ceilings"]:
            found.setdefault(run_facts.device(run), run["ceilings"])
    rows = [
        [name, c["precision"], c["flops_per_second"] / 1e12, c["bytes_per_second"] / 1e9, c["operation_seconds"] * 1e6]
        for name, c in found.items()
    ]
    return tables.markdown(["device", "precision", "GEMM TFLOP/s", "copy GB/s", "one small operation, us"], rows)


def efficiency(*folders: Path) -> str:
    """A row per run: how near a step comes to three limits, and how long the GPU waits.

    Bytes are the least that the operators have to move. Launches are those of a step, each at the measured cost of one small
    operation; on a CPU nothing is launched. A profiler slows the host, so idle time is an upper bound.
    """
    rows: list[list[object]] = []
    for run, path in baseline_runs(*folders):
        profile, limits, seconds = step_profile.read(path), run["ceilings"], run["step_ms"]["median"] / 1e3
        if limits:
            moved = sum(row.bytes for row in bandwidth.from_profile(profile)[0]) / seconds / limits["bytes_per_second"]
            launches = profile["launch"]["count"] / profile["profiled_steps"] or None
            rows.append([
                *rows_of([run], ["run", "MFU %", "% of measured GEMM"])[0], 100 * moved,
                launches, launches and 100 * launches * limits["operation_seconds"] / seconds,
                step_profile.idle_percent(profile),
            ])  # fmt: skip
    columns = ["run", "MFU %", "% of measured GEMM", "% of measured copy", "launches", "launches, % of step", "GPU idle %"]
    return tables.markdown(columns, rows)


def trials(folder: Path) -> str:
    """The run at the smallest preset, and runs with another learning rate or initialisation."""
    runs = [next(baseline_runs(folder))[0], *map(run_record.read_timed, sorted(folder.glob("trial_*.json")))]
    rows: list[list[object]] = []
    for run in runs:
        spread = run["model"]["initializer_range"] or "sqrt(2 / (5 D))"
        rows.append([run["training"]["learning_rate"], spread, f"{run_facts.last_loss(run):.3f}", run_facts.device(run)])
    return tables.markdown(["learning rate", "standard deviation of the weights", "loss (last 20 steps)", "device"], rows)


def curves(folder: Path) -> str:
    """A column per version after the first: the largest difference of its losses to the first version's so far."""
    runs = [run_record.read_timed(path) for path in sorted(folder.glob("curve_*.json"))]
    if len(runs) < 2:
        raise UsageError(f"{folder} needs curve_*.json of two versions: runs with the same --num-steps and --metrics-out FILE")
    expected, *others = [run["loss"]["all"] for run in runs]
    far = [[abs(a - b) for a, b in zip(losses, expected, strict=True)] for losses in others]
    rows = [[step, *(f"{max(each[:step]):.1e}" for each in far)] for step in range(20, len(expected) + 1, 20)]
    names = [f"{label(run)}, {run_facts.device(run)}" for run in runs[1:]]
    return tables.markdown([f"largest difference to {label(runs[0])} up to step", *names], rows)


# ----------------------------------------------------------------------------------------------------------------- studies


def captured_steps(folder: Path) -> str:
    """A row per model, a column per preset, precision and shape: ms per step, then captured as one graph, and the ratio.

    A model NAME counts if the benchmark has NAME-captured too. A step that was not measured is replaced by its status.
    """
    studies, models, cases = _cases(folder, "captured_{preset}_{precision}.json")
    rows: dict[str, dict[str, str]] = {}
    for case, found in cases.items():
        for model in models:
            if model in found and model + known_models.CAPTURED in found:
                pair = found[model], found[model + known_models.CAPTURED]
                rows.setdefault(model, {})[", ".join(case)] = _eager_to_captured(*pair)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return table(["model", *columns], [[model, *map(row.get, columns)] for model, row in rows.items()], *studies)


def _eager_to_captured(eager: Cell, captured: Cell) -> str:
    before, after = _median_ms(eager), _median_ms(captured)
    shown = [f"{format_number(ms)} ms" if ms else cell["status"] for ms, cell in ((before, eager), (after, captured))]
    return " -> ".join(shown) + (f" ({before / after:.2f}x)" if before and after else "")


Cases = dict[tuple[str, ...], dict[str, Cell]]


def _cases(folder: Path, pattern: str) -> tuple[list[Benchmark], list[str], Cases]:
    """The benchmarks, their models, and the cells by (preset, precision, shape) and model.

    The models stand in the order of the file that has most.
    """
    found = find(folder, pattern)
    studies = [benchmark_file.read(path) for *_, path in found]
    models = dict.fromkeys(name for study in sorted(studies, key=lambda study: -len(study["models"])) for name in study["models"])
    cases: Cases = {}
    for (preset, precision, _), study in zip(found, studies, strict=True):
        for cell in study["cells"]:
            shape = f"{cell['batch_size']} x {cell['sequence_length']}"
            cases.setdefault((preset, precision, shape), {})[cell["model"]] = cell
    return studies, list(models), cases


def _peers(folder: Path) -> tuple[list[Benchmark], list[str], Cases]:
    return _cases(folder, "peers_{preset}_{precision}.json")


def _median_ms(cell: Cell) -> float | None:
    return median(run["step_ms"]["median"] for run in cell["runs"]) if cell["status"] == "ok" else None


def versions_and_peers(folder: Path) -> str:
    """A row per model, a column per preset, precision and shape: ms per step, and how many times faster than the first model.

    The fastest of a column is bold. A case without a time of the first model is only in `versions_and_peers_spread`. A step that
    was not measured is replaced by its status.
    """
    studies, models, cases = _peers(folder)
    columns = {", ".join(case): found for case, found in cases.items() if models[0] in found and _median_ms(found[models[0]])}
    rows: list[list[object]] = []
    for model in models:
        row = [_time_and_ratio(model, found, found[models[0]]) if model in found else None for found in columns.values()]
        rows += [[model, *row]] if any(row) else []
    return table(["model", *columns], rows, *studies)


def _time_and_ratio(model: str, cells: dict[str, Cell], reference: Cell) -> str:
    ms, most = _median_ms(cells[model]), _median_ms(reference)
    if ms is None or most is None:
        return cells[model]["status"]
    shown = f"{format_number(ms)} ms, {format_number(most / ms)}x"
    return f"**{shown}**" if ms == min(filter(None, map(_median_ms, cells.values()))) else shown


def versions_and_peers_spread(folder: Path) -> str:
    """A row per preset, precision, shape and model: ms per step, their range over the processes, and memory.

    The memory is what the pools of the allocator hold, in GiB. A step that was not measured is replaced by its status.
    """
    studies, models, cases = _peers(folder)
    rows = []
    for case, found in cases.items():
        for model, cell in ((name, found[name]) for name in models if name in found):
            times = [run["step_ms"]["median"] for run in cell["runs"]]
            ends = f"{format_number(min(times))} to {format_number(max(times))}" if times else None
            held = f"{median(run['reserved_mib'] for run in cell['runs']) / 1024:.2f}" if times else None
            rows.append([*case, model, format_number(_median_ms(cell)) or cell["status"], ends, held])
    return table(["preset", "precision", "B x S", "model", "ms/step", "range", "GiB held"], rows, *studies)


def lengths(path: Path) -> str:
    """Peak memory over the sequence length, and the parabolas through it."""
    runs = growth.load(path)
    peaks = table(*growth.peak_table(runs), *(run.record for run in runs))
    return f"{peaks}\n{tables.markdown(*growth.fit_table(runs))}"


def weak_scaling(folder: Path) -> str:
    """A row per preset, version and form, a column per number of GPUs: step time and efficiency, if each GPU keeps its batch."""
    found: dict[tuple, dict[int, str]] = {}
    studies = []
    for preset, precision, path in find(folder, "scaling_{preset}_{precision}.json", "measure_scaling.sh"):
        studies.append(scaling_file.read(path))
        for row in scaling_results.results(studies[-1]):
            if row["scaling"] == "weak" and row["ms"]:
                time = tables.format_time(row["ms"])
                for form in [row["parallel"]] if row["parallel"] else studies[-1]["forms"]:
                    cells = found.setdefault((preset, precision, row["model"], form), {})
                    cells[row["processes"]] = time if row["processes"] == 1 else f"{time}, {100 * row['efficiency']:.0f}%"
    found = {key: cells for key, cells in found.items() if len(cells) > 1}
    counts = sorted({count for cells in found.values() for count in cells})
    columns = ["preset", "precision", "version", "form", *(f"{count} GPU{'s' * (count > 1)}" for count in counts)]
    rows = [[*key, *(cells.get(count, "") for count in counts)] for key, cells in sorted(found.items())]
    return table(columns, rows, *studies)


def clocks(folder: Path) -> str:
    """A row for each GPU of each sampled job: step time at the beginning, at the end and in all, and clock and power in training.

    Reads what `sample_gpu.py` wrote while a job trained, JOB.csv, and its record: JOB.json, or JOB_GPU.json of runs side by side.
    Samples of training are those with over nine tenths of the GPU's highest power.
    """
    rows, records = [], []
    for path in sorted(folder.glob("*.csv")):
        for gpu, samples in pandas.read_csv(path).groupby("gpu"):
            own = path.with_name(f"{path.stem}_{gpu}.json")
            record = run_record.read_timed(own if own.exists() else path.with_suffix(".json"))
            steps = record["step_ms"]["all"]
            clock, power = samples[samples.power_w > 0.9 * samples.power_w.max()][["clock_mhz", "power_w"]].median()
            rows.append([path.stem, gpu, median(steps[:12]), median(steps[-100:]), median(steps), clock, power])
            records.append(record)
    if not rows:
        raise UsageError(f"no .csv file in {folder}: sample a job with sample_gpu.py --output JOB.csv")
    header = ["job", "GPU", "first 12 steps, ms", "last 100, ms", "all, ms", "clock, MHz", "power, W"]
    return table(header, rows, *records)
