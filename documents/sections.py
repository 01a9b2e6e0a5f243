"""Sections of reports, as documents embed them: tables of a script, from the file that it wrote."""

from collections.abc import Callable, Sequence
from pathlib import Path

from common import ROOT
from documents import rows
from tracepage import files
from tracepage.records.study_files import Ablation, Benchmark, KernelBenchmark
from tracepage.show import tables
from tracepage.show.report import Report
from tracepage.views import benchmark_suite, fusion_ablation, kernel_benchmark

RENDERERS: dict[str, Callable[[Path], Report]] = {
    files.schema_of(Ablation): fusion_ablation.render_ablation,
    files.schema_of(Benchmark): benchmark_suite.render_benchmark,
    files.schema_of(KernelBenchmark): kernel_benchmark.render_kernel_benchmark,
}


def section(anchor: str, paths: Sequence[Path], columns: Sequence[str] = ()) -> str:
    """Markdown: for each file its name, its conditions, and the first table of the section, all
    columns or these.
    """
    parts = []
    for path in paths:
        record = files.read_json(path)
        report = RENDERERS[record["schema"]](path)
        [items] = [section.items for section in report.sections if section.anchor == anchor]
        table = next(item.content for item in items if item.kind == "table")
        header = columns or table.header
        places = [table.header.index(name) for name in header]
        cells = [list(map(row.__getitem__, places)) for row in table.rows]
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        parts.append(f"`{name.as_posix()}`: {rows.conditions([record])}")
        parts.append(tables.markdown(header, cells, table.code).strip())
    return "\n\n".join(parts)
