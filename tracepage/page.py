"""Makes one HTML page of a run, or of two side by side.

    tracepage pytorch_profiles
    tracepage profile_a.json profile_b.json --output two.html
    tracepage trace_rank*.json                # or their folder: all ranks of a job on one page
    tracepage snapshot.pickle                 # of torch.cuda.memory._dump_snapshot; or two
    tracepage trace.json --output report.md   # or report.json: what limits the step, and its parts

In a clone, `python page.py` is the same command.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tracepage import command_line
from tracepage.causes import rank_waits
from tracepage.errors import UsageError
from tracepage.files import writable_file, write_json, write_text
from tracepage.readers import allocator_history, load_kernels, rank_traces
from tracepage.records import step_profile
from tracepage.show import rank_sections, snapshot_sections
from tracepage.show.report import Report
from tracepage.views import run_page

KINDS = (".html", ".md", ".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", type=Path, metavar="A", help="a profile or a trace, or what another profiler wrote"
    )
    parser.add_argument(
        "others",
        type=Path,
        nargs="*",
        metavar="B",
        help="another one, beside it on the page, or the traces of a job's other ranks",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("run.html"),
        metavar="FILE",
        help=".html, .md or .json (default: run.html)",
    )
    parser.add_argument(
        "--capture",
        type=Path,
        metavar="TRACE",
        help="a trace of the same work without a CUDA graph: names the operators of A's graphs",
    )
    options = command_line.parse(parser)
    kind = ".html" if options.output.is_char_device() else options.output.suffix
    if kind not in KINDS:
        raise UsageError(f"--output {options.output}: name a .html, .md or .json file")
    if options.capture and options.others:
        raise UsageError("--capture explains one trace: give A alone")
    inputs = [options.run, *options.others]
    # A page may lie in the folder whose files it shows.
    input_files = [path for path in (*inputs, options.capture) if path and path.is_file()]
    output = writable_file(options.output, "--output", input_files)
    if kind == ".json" and output.is_file():
        _refuse_file_of_profiler(output)
    paths = list(map(_profile_in, inputs))
    of_memory = any(map(allocator_history.is_snapshot, paths))
    traces, notes = ({}, []) if of_memory else rank_traces.find(paths)
    if of_memory:
        _write_snapshots(output, kind, paths)
    elif traces:
        ranks = {number: rank_waits.read_rank(path) for number, path in traces.items()}
        job = rank_waits.compare(ranks, notes)
        page = partial(run_page.ranks_page, job)
        _write(output, kind, page, page, partial(rank_sections.content, job))
    else:
        sources = [run_page.load_page_source(path, options.capture) for path in paths]
        page = partial(run_page.make_page, sources)
        summary = partial(run_page.summary_report, sources)
        _write(output, kind, page, summary, partial(run_page.summary_json, sources))
    print(f"written: {output}")


def _refuse_file_of_profiler(output: Path) -> None:
    """UsageError: what the output would replace is no report."""
    if load_kernels.recognize(output) in load_kernels.READERS:
        raise UsageError(f"--output: {output} is a profiler's: name another file")


def _write_snapshots(output: Path, kind: str, paths: list[Path]) -> None:
    """UsageError: there are more than two."""
    if len(paths) > 2:
        raise UsageError("give one memory snapshot, or two to compare")
    snapshots = list(map(allocator_history.read, paths))
    page = partial(snapshot_sections.page_of, snapshots)
    _write(output, kind, page, page, partial(snapshot_sections.content, snapshots))


def _write(
    output: Path,
    kind: str,
    page: Callable[[], Report],
    summary: Callable[[], Report],
    content: Callable[[], dict[str, Any]],
) -> None:
    """Makes and writes what one of KINDS asks for."""
    if kind == ".html":
        write_text(output, page().html())
    elif kind == ".md":
        write_text(output, summary().markdown())
    else:
        write_json(output, content())


def _profile_in(path: Path) -> Path:
    """The newest profile in a folder, or the path itself, if it holds none."""
    return step_profile.find(path) if any(path.glob("profile_*.json")) else path


def command() -> None:
    """`page.py`, and the command of the installed package."""
    sys.exit(command_line.exit_code(main))
