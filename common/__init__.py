"""Everything that is the same in every version of the model; the model and its operations live in the version folders.

Importing it makes two ends of a program one line: Ctrl-C while PyTorch is imported, and an import of a package that is not
installed.
"""

import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


def _say_it_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):  # during the imports, which take seconds; later `cli.command` handles it
        print("interrupted", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and error.name and not (ROOT / error.name.partition(".")[0]).is_dir():
        print(
            f"error: {error.name} is not installed in this Python ({sys.executable}): run `make setup` in {ROOT}, then "
            f"`source {ROOT}/.venv/bin/activate`",
            file=sys.stderr,
        )
        sys.exit(2)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say_it_in_one_line
