"""Sections of reports, as documents embed them: the tables that a script printed, made again from the file that it wrote.

Each schema has one renderer, the report that its script prints. The tables of several files are joined: columns in front say by
what the files differ, such as the preset.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import files
from common.analysis.comparisons import ablation_effects
from common.analysis.output import run_facts, tables
from common.analysis.output.report import Report, Table
from common.analysis.reports import kernel_benchmark
from common.config import PRESETS
from common.documents import lab_dashboard
from common.documents.result_tables import compute, conditions
from common.errors import UsageError
from common.records import lab_file
from common.records.study_files import Ablation, Benchmark, KernelBenchmark, Scaling
from common.studies import benchmark_report, scaling

RENDERERS: dict[str, Callable[[Path], Report]] = {
    files.schema_of(Ablation): ablation_effects.analyze,
    files.schema_of(Benchmark): benchmark_report.analyze,
    files.schema_of(KernelBenchmark): kernel_benchmark.analyze,
    lab_file.SCHEMA: lab_dashboard.analyze,
    files.schema_of(Scaling): scaling.analyze,
}


def section(anchor: str, *patterns: Path) -> str:
    """Markdown: the conditions of the files, the tables of the section with this anchor, and the paragraphs that all have.

    UsageError: there is no such file (`patterns` may be globs) or section, or a file is damaged or has no renderer.
    """
    paths = [path for pattern in patterns for path in pattern.parent.glob(pattern.name)]
    if not paths:
        raise UsageError(f"there is no {' or '.join(map(str, patterns))}")
    items, records = {path: _items(path, anchor) for path in paths}, {path: files.read_json(path) for path in paths}
    named = {path: _named(path, record) for path, record in records.items()}
    paths.sort(key=lambda path: ([*PRESETS, ""].index(named[path]["preset"]), named[path]["precision"], path))
    columns = [name for name in ("device", "preset", "precision") if len({names[name] for names in named.values()}) > 1]
    joined: dict[tuple[str, ...], Table] = {}  # by title and header
    paragraphs: list[list[str]] = []
    for path in paths:
        paragraphs.append([item for item in items[path] if isinstance(item, str)])
        for item in (item for item in items[path] if isinstance(item, Table)):
            header, rows = [*columns, *item.header], [[*map(named[path].get, columns), *row] for row in item.rows]
            key = (item.title, *header)
            known = joined.get(key)
            joined[key] = item._replace(header=header, rows=[*(known.rows if known else ()), *rows])
    parts = [conditions(*(records[path] for path in paths))]
    for table in joined.values():
        parts += [f"**{table.title}**"] * bool(table.title) + [tables.markdown(table.header, table.rows, table.code).strip()]
    parts += [text for text in paragraphs[0] if all(text in others for others in paragraphs)]
    return "\n\n".join(parts) + "\n"


def _named(path: Path, record: dict[str, Any]) -> dict[str, str]:
    """By what the tables of several files are told apart; the preset is a part of the file's name."""
    preset = next((part for part in path.stem.split("_") if part in PRESETS), "")
    return {"device": run_facts.device(record), "preset": preset, "precision": compute(record)}


def _items(path: Path, anchor: str) -> list[Table | str]:
    """The tables and paragraphs of a section of a file's report."""
    content = files.read_json(path)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in RENDERERS:
        raise UsageError(f"{path}: no renderer of schema {schema}; there are those of {', '.join(RENDERERS)}")
    found = {part.anchor: part.items for part in RENDERERS[schema](path).sections}
    if anchor not in found:
        raise UsageError(f"{path} has no section {anchor}; there are {', '.join(filter(None, found))}")
    return [item.content for item in found[anchor] if item.kind in ("table", "text")]
