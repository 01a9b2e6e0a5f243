"""The curve over the batch size that a search has measured (written by `common.batch_search`), and its answer."""

from pathlib import Path
from typing import Any

from common.analysis import plots, tables
from common.files import read_json, write_text

SCHEMA = "tiny-llama-batch-search/1"
FITS, OVER, OUT = "ok", "over target", "out of memory"
NAME = "batch_search"


def analyze(path: Path, folder: Path) -> str:
    """Reads batch_search.json and writes batch_search.csv, .md and .png into `folder`.

    Returns:
        The curve and the answer, for the terminal.

    Raises:
        UsageError: the file is not of schema tiny-llama-batch-search/1.
    """
    measured = read_json(path, SCHEMA)
    header, rows = table(measured)
    write_text(folder / f"{NAME}.csv", _csv(measured))
    parts = [
        "# Batch size search",
        conditions(measured),
        f"Made by `{measured['command']}` on {measured['date']}.",
        f"![Throughput, step time and memory over the batch size]({NAME}.png)",
        tables.markdown(header, rows).strip(),
        *findings(measured),
    ]
    write_text(folder / f"{NAME}.md", "\n\n".join(parts) + "\n")
    plot(measured, folder / f"{NAME}.png")
    written = ", ".join(str(folder / f"{NAME}.{kind}") for kind in ("json", "csv", "md", "png"))
    return "\n\n".join([conditions(measured), tables.text(header, rows), *findings(measured), f"written: {written}"])


def curve(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The trials, smallest batch first, with memory_percent, the peak's share of the device's memory."""
    whole = measured["device"]["memory_mib"]
    trials = sorted(measured["trials"], key=lambda trial: trial["batch_size"])
    return [trial | {"memory_percent": trial["peak_mib"] and 100 * trial["peak_mib"] / whole} for trial in trials]


def table(measured: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    """A row per trial, smallest batch first."""
    header = ["B", "ms/step", "p20", "p80", "tokens/s", "peak MiB", "% of memory", "status"]
    rows = []
    for trial in curve(measured):
        step = trial["step_ms"] or {}
        status = f"{trial['status']}, chosen" if trial["batch_size"] == measured["batch_size"] else trial["status"]
        rows.append([
            trial["batch_size"], step.get("median"), step.get("p20"), step.get("p80"), trial["tokens_per_second"],
            trial["peak_mib"], trial["memory_percent"], status,
        ])  # fmt: skip
    return header, rows


def conditions(measured: dict[str, Any]) -> str:
    device = measured["device"]
    on = [name for name, value in measured["settings"].items() if value is True]
    switches = f" ({', '.join(on) or 'nothing'} on)" if measured["settings"] else ""
    return (
        f"{measured['version']}{switches}, {device['name']}, {measured['precision']['compute']}, torch "
        f"{measured['environment']['torch']}, sequence length {measured['training']['sequence_length']}; "
        f"{tables.letters(measured['model'])}. Step times are medians. Memory: peak of the "
        f"{measured['memory_kind']}; % of the {device['memory_mib']:,.0f} MiB that there are."
    )


def findings(measured: dict[str, Any]) -> list[str]:
    """Which rule ended the search, and the answer, a paragraph each."""
    share = f"{100 * measured['target_memory_usage']:g} %"
    return [
        f"Doubling ended: {measured['ended']}. The target is at most {share} of the memory.",
        f"Batch size for {measured['target']}: {measured['batch_size']}. It is {measured['reason']}.",
    ]


def _csv(measured: dict[str, Any]) -> str:
    header = ["batch_size", "ms", "p20", "p80", "tokens_per_second", "peak_mib", "memory_percent", "status"]
    pairs = zip(table(measured)[1], curve(measured), strict=True)
    return tables.csv_text(header, ([*row[:-1], trial["status"]] for row, trial in pairs))


def plot(measured: dict[str, Any], path: Path) -> None:
    """Throughput, step time and share of the memory over the batch size; the answer is marked."""
    figure = plots.new(15, 4.8)
    figure.suptitle(
        f"Batch size for {measured['target']}: {measured['batch_size']} ({measured['version']}, "
        f"{measured['precision']['compute']}, sequence length {measured['training']['sequence_length']}, "
        f"{measured['device']['name']})"
    )
    trials = [trial for trial in curve(measured) if trial["status"] != OUT]
    sizes = [trial["batch_size"] for trial in trials]
    throughput, times, memory = figure.subplots(1, 3)
    throughput.plot(sizes, [trial["tokens_per_second"] for trial in trials], "o-", color=plots.BLUE)
    throughput.set(title="Throughput", ylabel="tokens/s")
    medians = [trial["step_ms"]["median"] for trial in trials]
    below = [trial["step_ms"]["median"] - trial["step_ms"]["p20"] for trial in trials]
    over = [trial["step_ms"]["p80"] - trial["step_ms"]["median"] for trial in trials]
    times.errorbar(sizes, medians, (below, over), fmt="o-", capsize=4, color=plots.BLUE)
    times.set(title="Step time: median, p20 to p80", ylabel="ms per step")
    memory.plot(sizes, [trial["memory_percent"] for trial in trials], "o-", color=plots.BLUE)
    memory.axhline(100 * measured["target_memory_usage"], color=plots.VERMILION, linestyle="--", label="target")
    memory.set(title=f"Peak memory ({measured['memory_kind']})", ylabel=f"% of {measured['device']['memory_mib']:,.0f} MiB")
    for axes in (throughput, times, memory):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="batch size")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
        axes.axvline(measured["batch_size"], color=plots.ORANGE, label="chosen")
        axes.grid(True, color="0.9")
        axes.legend()
    plots.save(figure, path)
