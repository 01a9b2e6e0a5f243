"""Makes one HTML page of a run, or of two side by side.

    tracepage pytorch_profiles
    tracepage profile_a.json profile_b.json --output two.html
    tracepage trace.json --output report.md   # or report.json: what limits the step, and its parts

In a clone, `python page.py` is the same command.
"""

import argparse
import sys
from pathlib import Path

from tracepage import command_line
from tracepage.errors import UsageError
from tracepage.files import writable_file, write_json, write_text
from tracepage.records import step_profile
from tracepage.views import run_page

KINDS = (".html", ".md", ".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", type=Path, metavar="A", help="a profile or a trace, or what another profiler wrote"
    )
    parser.add_argument(
        "other", type=Path, nargs="?", metavar="B", help="another one, beside it on the page"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("run.html"),
        metavar="FILE",
        help=".html, .md or .json (default: run.html)",
    )
    options = command_line.parse(parser)
    kind = options.output.suffix
    if kind not in KINDS:
        raise UsageError(f"--output {options.output}: name a .html, .md or .json file")
    inputs = [path for path in (options.run, options.other) if path]
    # A page may lie in the folder whose files it shows.
    input_files = [path for path in inputs if path.is_file()]
    output = writable_file(options.output, "--output", input_files)
    sources = [run_page.load_page_source(_profile_in(path)) for path in inputs]
    if kind == ".html":
        write_text(output, run_page.make_page(sources).html())
    elif kind == ".md":
        write_text(output, run_page.summary_report(sources).markdown())
    else:
        write_json(output, run_page.summary_json(sources))
    print(f"written: {output}")


def _profile_in(path: Path) -> Path:
    """The newest profile in a folder, or the path itself, if it holds none."""
    return step_profile.find(path) if any(path.glob("profile_*.json")) else path


def command() -> None:
    """`page.py`, and the command of the installed package."""
    sys.exit(command_line.exit_code(main))
