"""Sections of reports, as documents embed them: the tables that a script printed, made again from
the file that it wrote.
"""

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
        parts.append(
            tables.markdown([table.header[place] for place in places], body, table.code).strip()
        )
    return "\n\n".join(parts)
