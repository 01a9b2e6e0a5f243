"""Makes one HTML page of a run, or of two side by side.

    tracepage pytorch_profiles
    tracepage profile_a.json profile_b.json --output two.html

In a clone, `python page.py` is the same command.
"""

import argparse
import sys
from pathlib import Path

from tracepage import command_line
from tracepage.errors import UsageError
from tracepage.files import writable_file, write_text
from tracepage.records import step_profile
from tracepage.views import run_page


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
        metavar="FILE.html",
        help="default: run.html",
    )
    options = command_line.parse(parser)
    inputs = [path for path in (options.run, options.other) if path]
    output = writable_file(options.output, "--output", inputs)
    # Neither a profile nor the trace beside it has such a name.
    if output.suffix != ".html" and not output.is_char_device():
        raise UsageError(f"--output {output}: name a .html file")
    sources = [run_page.load_page_source(_profile_in(path)) for path in inputs]
    write_text(output, run_page.make_page(sources).html())
    print(f"written: {output}")


def _profile_in(path: Path) -> Path:
    """The newest profile in a folder, or the folder, if other profilers wrote what it holds."""
    is_foreign = path.is_dir() and not any(path.glob("profile_*.json"))
    return path if is_foreign else step_profile.find(path)


def command() -> None:
    """`page.py`, and the command of the installed package."""
    sys.exit(command_line.exit_code(main))
