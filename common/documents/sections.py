"""Sections of reports, as documents embed them: the tables that a script printed, made again from the file that it wrote."""

from collections.abc import Callable, Sequence
from pathlib import Path

from common import ROOT, files
from common.analysis.comparisons import ablation_effects
from common.analysis.output import tables
from common.analysis.output.report import Report
from common.analysis.reports import kernel_benchmark
from common.documents import rows
from common.records.study_files import Ablation, Benchmark, KernelBenchmark
from common.studies import benchmark_report

RENDERERS: dict[str, Callable[[Path], Report]] = {
    files.schema_of(Ablation): ablation_effects.analyze,
    files.schema_of(Benchmark): benchmark_report.analyze,
    files.schema_of(KernelBenchmark): kernel_benchmark.analyze,
}


def section(anchor: str, paths: Sequence[Path], columns: Sequence[str] = ()) -> str:
    """Markdown: for each file its name, its conditions, and the first table of the section, all columns or these."""
    parts: list[str] = []
    for path in paths:
        record = files.read_json(path)
        report = RENDERERS[record["schema"]](path)
        [items] = [section.items for section in report.sections if section.anchor == anchor]
        table = next(item.content for item in items if item.kind == "table")
        places = [list(table.header).index(name) for name in columns or table.header]
        body = [[row[place] for place in places] for row in table.rows]
        named = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        parts.append(f"`{named.as_posix()}`: {rows.conditions([record])}")
        parts.append(tables.markdown([table.header[place] for place in places], body, table.code).strip())
    return "\n\n".join(parts)
