"""Tables that join the files of several runs or studies in results/<device>/.

The measure_*.sh in results/ say which of these files they write. The others come from training runs with `--metrics-out`:
curve_<version>.json, with one `--num-steps` in each version's folder, and trial_*.json, the first version with one setting
changed (LOG.md has the commands). The tables of one file are those of its report (`common.documents.sections`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.analysis.comparisons import growth
from common.analysis.output import run_facts, tables
from common.analysis.output.tables import format_number
from common.analysis.reports import bandwidth
from common.config import PRESETS
from common.errors import UsageError
from common.records import run_record, step_profile, study_files
from common.records.run_record import TimedRun
from common.records.study_files import Benchmark, BenchmarkCell
from common.studies import known_models, scaling

import pandas

FORMATS = ("bf16", "fp8")  # of a block's products
Record = Mapping[str, Any]  # of a run or a study: it has the keys of fields.Header


# -------------------------------------------------------------------------------------------------------- files and records


def find(folder: Path, pattern: str, script: str = "measure_versions.sh") -> list[tuple[str, str, Path]]:
    """Preset, precision and path of matching files, in the order of presets, precisions and names. UsageError: there are none.

    In `pattern`, which holds globs, "{preset}" and "{precision}" stand for their names; `script` in results/ writes such files.
    """
    pairs = [(preset, precision) for preset in PRESETS for precision in (("fp32", "bf16") if "{precision}" in pattern else [""])]
    globs = [(a, b, one.format(preset=a, precision=b)) for a, b in pairs for one in pattern.split()]
    found = [(preset, precision, path) for preset, precision, glob in globs for path in sorted(folder.glob(glob))]
    if not found:
        raise UsageError(f"no {globs[0][2]} or the like in {folder}: measure with results/{script} {folder.name}")
    return found


def baseline_runs(*folders: Path) -> Iterator[tuple[TimedRun, Path]]:
    """The record of each run that has a profile of the same configuration, and the path of that profile."""
    for folder in folders:
        for _, _, path in find(folder, "v[0-9]_{preset}.json", "measure_v1.sh"):
            yield run_record.read_timed(path), path.with_name(f"{path.stem}_profile.json.gz")


def compared(folder: Path) -> list[list[TimedRun]]:
    """The runs at each preset and precision, two or more, the same version first. UsageError: it or all others are missing."""
    files = find(folder, "compare_{preset}_{precision}_*.json")
    groups = [[run_record.read_timed(path) for *_, path in group] for _, group in groupby(files, lambda file: file[:2])]
    reference = min(runs[0]["version"] for runs in groups)
    for first, *others in groups:
        if first["version"] != reference or not others:
            case = f"{first['training']['preset']}_{compute(first)}"
            raise UsageError(f"{folder} needs compare_{case}_{reference}.json, and a run of another version beside it")
    return groups


def label(run: Record) -> str:
    """The version and the switches that its command changed, such as "Version 2, torch-compile"."""
    switched = re.findall(r"--(enable|disable)-([\w-]+)", run["command"])
    changes = (name if change == "enable" else f"no {name}" for change, name in switched)
    return ", ".join([run["version"].replace("v", "Version "), *changes])


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *records: Record) -> str:
    """A Markdown table below the conditions of the records that it was made from."""
    return f"{conditions(*records)}\n\n{tables.markdown(columns, rows)}"


def compute(record: Record) -> str:
    """The number format."""
    precision = record["precision"]  # text in a profiling_lab.json
    return precision if isinstance(precision, str) else precision["compute"]


def conditions(*records: Record) -> str:
    """Devices, packages and dates of records in a line.

    The line has the model and the number format if all records have the same, and the command if there is one record.
    """
    facts = [run_facts.device(record) for record in records]
    for record in records:
        facts += map(" ".join, ({"torch": record["environment"]["torch"]} | record.get("packages", {})).items())
    models = (tables.letters(record["model"]) if "model" in record else "" for record in records)
    configurations = {", ".join(filter(None, pair)) for pair in zip(map(compute, records), models, strict=True)}
    dates = sorted(record["date"][:10] for record in records)
    facts += [*configurations][: len(configurations) == 1] + [" to ".join(dict.fromkeys([dates[0], dates[-1]]))]
    if len(records) == 1:
        facts.append(f"`{re.sub(' --(output-dir|metrics-out) [^ ]+', '', records[0]['command'])}`")
    return "; ".join(dict.fromkeys(facts))


# -------------------------------------------------------------------------------------------------------------------- runs


def training(*folders: Path) -> str:
    """A row per run: shape, step time, throughput, memory, FLOP/s, utilization and loss."""
    return _facts(
        folders, "preset", "device", "precision", "B x S", "M parameters", "ms/step", "p20 to p80", "tokens/s", "peak memory",
        "TFLOP/s", "MFU %", "% of measured GEMM", "loss",
    )  # fmt: skip


def phases(*folders: Path) -> str:
    """A row per run: its forward pass, backward pass and optimizer in ms, timed apart."""
    return _facts(folders, "run", "forward ms", "backward ms", "optimizer ms")


def _facts(folders: Sequence[Path], *columns: str) -> str:
    """A row per run with these columns of `run_facts.columns`."""
    return tables.markdown(columns, [[run_facts.columns(run)[name] for name in columns] for run, _ in baseline_runs(*folders)])


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
    rows: dict[str, list[object]] = {}
    for run, _ in baseline_runs(*folders):
        if best := run["ceilings"]:
            rates = best["flops_per_second"] / 1e12, best["bytes_per_second"] / 1e9, best["operation_seconds"] * 1e6
            rows.setdefault(run_facts.device(run), [run_facts.device(run), best["precision"], *rates])
    return tables.markdown(["device", "precision", "GEMM TFLOP/s", "copy GB/s", "one small operation, us"], rows.values())


def efficiency(*folders: Path) -> str:
    """A row per run that measured ceilings: how near a step comes to three limits, and how long the GPU waits."""
    header: list[str] = []
    rows: list[list[object]] = []
    for run, path in baseline_runs(*folders):
        if run["ceilings"]:
            limits = bandwidth.step_limits(step_profile.read(path), run)
            header = ["run", *limits]
            rows.append([run_facts.columns(run)["run"], *limits.values()])
    return tables.markdown(header, rows)


def trials(folder: Path) -> str:
    """The run at the smallest preset, and runs with another learning rate or initialization."""
    runs = [next(baseline_runs(folder))[0], *map(run_record.read_timed, sorted(folder.glob("trial_*.json")))]
    rows: list[list[object]] = []
    for run in runs:
        spread = run["model"]["initializer_range"] or "sqrt(2 / (5 D))"
        rows.append([run["training"]["learning_rate"], spread, f"{run_facts.last_loss(run):.3f}", run_facts.device(run)])
    return tables.markdown(["learning rate", "standard deviation of the weights", "loss (last 20 steps)", "device"], rows)


def curves(folder: Path) -> str:
    """A column per version after the first: the largest difference of its losses to the first version's, at five steps."""
    runs = [run_record.read_timed(path) for path in sorted(folder.glob("curve_*.json"))]
    if len(runs) < 2 or len({len(run["loss"]["all"]) for run in runs}) > 1:
        raise UsageError(f"{folder} needs curve_*.json of two versions: runs with the same --num-steps and --metrics-out FILE")
    expected, *others = [run["loss"]["all"] for run in runs]
    far = [[abs(a - b) for a, b in zip(losses, expected, strict=True)] for losses in others]
    steps = [len(expected) * fifth // 5 for fifth in range(1, 6)]
    rows = [[step, *(f"{max(each[:step]):.1e}" for each in far)] for step in steps]
    names = [f"{label(run)}, {run_facts.device(run)}" for run in runs[1:]]
    return tables.markdown([f"largest difference to {label(runs[0])} up to step", *names], rows)


def number_formats(folder: Path) -> str:
    """A row per preset: the step with and without products in FP8, and its share of both formats' peaks (`format_*.json`)."""
    rows, runs = [], []
    for preset in PRESETS:
        before, after = ([*map(run_record.read_timed, sorted(folder.glob(f"format_{preset}_{name}*.json")))] for name in FORMATS)
        if before and after:
            old, new = (median(run["step_ms"]["median"] for run in found) for found in (before, after))
            shares = []
            for found, name in ((before, "bf16"), (after, "bf16"), (after, "fp8")):
                peak = run_facts.peak_flops(found[0], name)
                shares.append(peak and 100 * median(run["flops_per_second"] for run in found) / peak)
            rows.append([preset, old, new, old / new, *shares])
            runs += before + after
    if not runs:
        raise UsageError(f"{folder} needs format_PRESET_bf16.json and format_PRESET_fp8.json of a preset")
    names = ["preset", "bf16, ms", "FP8, ms", "times as fast", "bf16: MFU, %", "FP8: MFU, % of bf16's peak", "% of FP8's"]
    return table(names, rows, *runs)


def format_curves(folder: Path) -> str:
    """A row per seed: the loss with and without products in FP8, a mean of the last 20 steps (`format_curve_*.json`)."""
    runs = [[*map(run_record.read_timed, sorted(folder.glob(f"format_curve_*_{name}.json")))] for name in FORMATS]
    if not runs[0] or len(runs[0]) != len(runs[1]):
        raise UsageError(f"{folder} needs format_curve_SEED_bf16.json and format_curve_SEED_fp8.json of each seed")
    pairs = [*zip(*runs, strict=True)]
    rows = [[pair[0]["training"]["seed"], *(f"{run_facts.last_loss(run):.3f}" for run in pair)] for pair in pairs]
    return table(["seed", "bf16: loss", "FP8: loss"], rows, *sum(runs, []))


# ----------------------------------------------------------------------------------------------------------------- studies


class Case(NamedTuple):
    """All benchmarks of one preset, precision and shape: by model, the runs of every file."""

    preset: str
    precision: str
    shape: tuple[int, int]  # B and S
    studies: list[Benchmark]
    cells: dict[str, BenchmarkCell]

    def title(self) -> str:
        return f"{self.preset}, {self.precision}, {self.shape[0]} x {self.shape[1]}"

    def times(self, model: str) -> list[float]:
        """The median step of each process in ms; none if the model was not measured."""
        cell = self.cells.get(model)
        return [run["step_ms"]["median"] for run in cell["runs"]] if cell and cell["status"] == "ok" else []

    def status(self, model: str) -> str | None:
        return self.cells[model]["status"] if model in self.cells else None

    def fastest(self) -> str:
        return min(filter(self.times, self.cells), key=lambda model: median(self.times(model)))


def cases(folder: Path, precision: str = "") -> list[Case]:
    """The cases of peers_*.json and captured_*.json, of one precision or all: the one source of the versions' step times."""
    found: dict[tuple, Case] = {}
    for preset, compute, path in find(folder, "peers_{preset}_{precision}.json captured_{preset}_{precision}.json"):
        study = study_files.read_benchmark(path)
        for cell in study["cells"] if precision in ("", compute) else ():
            shape = cell["batch_size"], cell["sequence_length"]
            case = found.setdefault((preset, compute, shape), Case(preset, compute, shape, [], {}))
            if study not in case.studies:
                case.studies.append(study)
                if len({(run_facts.device(each), tables.letters(each["model"])) for each in case.studies}) > 1:
                    raise UsageError(f"{path} is of another device or model than the other benchmark of {case.title()} beside it")
            cells, known = case.cells, case.cells.setdefault(cell["model"], cell)
            if known is not cell and cell["status"] == "ok":
                runs = known["runs"] if known["status"] == "ok" else []
                cells[cell["model"]] = {**cell, "runs": [*runs, *cell["runs"]]}
    return list(found.values())


def models(found: Iterable[Case]) -> list[str]:
    """The models in the order in which studies know them, whatever that of the files, each with its captured step behind it."""
    names = {name for case in found for name in case.cells}
    base = {name: name.removesuffix(known_models.CAPTURED) for name in names}
    order = [*known_models.find(), *sorted(base.values())]  # those that studies no longer know come last
    return sorted(names, key=lambda name: (order.index(base[name]), name))


def ratio(reference: Sequence[float], times: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster: by the medians, and the least and the most over the processes."""
    return median(reference) / median(times), min(reference) / max(times), max(reference) / min(times)


def headline(folder: Path) -> tuple[list[Case], list[str]]:
    """The bf16 cases that have the first model, and their models. UsageError: there is none.

    Products in FP8 are left out. Of the models that were also measured without a capture, only the first is shown captured.
    """
    every, captured = models(cases(folder)), known_models.CAPTURED
    first = every[0]
    left_out = {name + captured for name in every[1:]} | {name for name in every if name.endswith(known_models.FP8)}
    found = []
    for case in (case for case in cases(folder, "bf16") if case.times(first)):
        names = (name for name in case.cells if name not in left_out)
        found.append(case._replace(cells={name: case.cells[name] for name in names}))
    if not found:
        raise UsageError(f"{folder}: no benchmark has {first} in bf16: measure with results/measure_versions.sh {folder.name}")
    return found, models(found)


def versions_and_peers(folder: Path) -> str:
    """A row per model, a column per case in bf16: ms per step, and how many times faster than the first model, with the range.

    The fastest of a column is bold, and a status replaces a step that was not measured. A line below holds the fastest against
    the captured step of the first model.
    """
    found, (first, *names) = headline(folder)
    rows = [[name, *(_time_and_ratio(case, name, first) for case in found)] for name in (first, *names)]
    captured = first + known_models.CAPTURED
    fastest = {case.preset: (case.fastest(), case) for case in found if case.times(captured)}
    faster = {preset: ratio(case.times(captured), case.times(name))[0] for preset, (name, case) in fastest.items()}
    against = [f"{preset}, {fastest[preset][0]} {format_number(value)}x" for preset, value in faster.items()]
    below = f"\nAgainst {captured}, which waits for no host: {'; '.join(against)}.\n" if against else ""
    return table(["model", *(case.title() for case in found)], rows, *(study for case in found for study in case.studies)) + below


def _time_and_ratio(case: Case, model: str, first: str) -> str | None:
    times = case.times(model)
    if not times:
        return case.status(model)
    faster, *ends = ratio(case.times(first), times)
    said = f" {_range(times)}" if model == first else f", {format_number(faster)}x {_range(ends)}"
    shown = f"{format_number(median(times))} ms{said}"
    return f"**{shown}**" if model == case.fastest() else shown


def _range(values: Sequence[float]) -> str:
    return f"({format_number(min(values))} to {format_number(max(values))})"


def versions_and_peers_spread(folder: Path) -> str:
    """A row per model, a column per case: median ms per step, the range over the processes, and GiB that the pools held."""

    def cell(case: Case, model: str) -> str | None:
        times = case.times(model)
        if not times:
            return case.status(model)
        held = median(run["reserved_mib"] for run in case.cells[model]["runs"]) / 1024
        return f"{format_number(median(times))} {_range(times)}, {held:.2f}"

    found = cases(folder)
    rows = [[name, *(cell(case, name) for case in found)] for name in models(found)]
    return table(["model", *(case.title() for case in found)], rows, *(study for case in found for study in case.studies))


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
        studies.append(study_files.read_scaling(path))
        for row in scaling.results(studies[-1]):
            if row["scaling"] == "weak" and row["ms"]:
                shared = f", {100 * row['efficiency']:.0f}%" if row["parallel"] and row["efficiency"] else ""
                for form in [row["parallel"]] if row["parallel"] else studies[-1]["forms"]:
                    cells = found.setdefault((preset, precision, row["model"], form), {})
                    cells[row["processes"]] = tables.format_time(row["ms"]) + shared
    found = {key: cells for key, cells in found.items() if any(count > 1 for count in cells)}
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
