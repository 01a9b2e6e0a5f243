"""The tables in the documents: generated between markers, from formulas or from the files in results/.

A marker names its table, `<!-- table: NAME -->`, or its table and files or folders of results, `<!-- table: NAME PATH... -->`.
The table ends at `<!-- /table -->`. Everything between the two is overwritten:

    python -m common.documents            # rewrites every document
    python -m common.documents --check    # changes nothing; exit code 1 and a line for each document that is out of date
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import cli
from common.analysis.comparisons import source_diff
from common.analysis.reports import kernel_benchmark
from common.documents import appendix, architecture, compiled_kernels, lab_dashboard, measured
from common.errors import RunError, UsageError
from common.files import write_text

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- table: ([\w-]+)((?: [\w./-]+)*) -->\n).*?(<!-- /table -->)", re.DOTALL)
FUNCTIONS = (  # each takes the paths of its marker and returns Markdown
    architecture.presets, architecture.shapes, architecture.parameters, architecture.forward_flops, architecture.states,
    architecture.activations, architecture.quadratic, architecture.intensity, architecture.balance, architecture.limits,
    architecture.fusion, appendix.fusion_bytes, appendix.intensities, appendix.attention_io, appendix.memory_saved,
    appendix.launches, appendix.amdahl, appendix.optimizer, appendix.profiler_cost, measured.training, measured.phases,
    measured.spans, measured.ceilings, measured.comparison, measured.rates, measured.trials, measured.curves,
    measured.combinations, measured.effects, measured.captured_steps, measured.versions_and_peers, measured.lengths,
    compiled_kernels.compiled, compiled_kernels.tritons, source_diff.forward_diff,
)  # fmt: skip
TABLES: dict[str, Callable[..., str]] = {function.__name__: function for function in FUNCTIONS}
TABLES |= {f"suite_{part}": partial(measured.suite, part) for part in ("throughput", "memory", "scaling")}
TABLES |= {"kernel_benchmark": kernel_benchmark.documented, **lab_dashboard.TABLES}


def documents() -> list[Path]:
    """All Markdown files of the repository."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(ROOT / path for path in paths if not any(part.startswith(".") for part in path.parts))


def refreshed(text: str) -> str:
    """The document with every marked table made anew.

    Raises:
        UsageError: a marker names a table that does not exist.
    """

    def replace(match: re.Match) -> str:
        opening, name, arguments, closing = match.groups()
        if name not in TABLES:
            raise UsageError(f"no table is called {name}; there are {', '.join(sorted(TABLES))}")
        return f"{opening}\n{TABLES[name](*(ROOT / argument for argument in arguments.split()))}\n{closing}"

    return MARKED.sub(replace, text)


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args().check
    stale = [path for path in documents() if refreshed(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    for path in stale:
        if not check:
            write_text(path, refreshed(path.read_text(encoding="utf-8")))
        print(f"{'out of date' if check else 'rewritten'}: {path.relative_to(ROOT)}")
    if check and stale:
        raise RunError("run python -m common.documents")
