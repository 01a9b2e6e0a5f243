"""Everything that is the same in every version of the model; the model and its operations live in the version folders.

Each folder with scripts has a link to this one, so that its scripts find it from any directory and use the copy that they came
with. Importing it first checks that the packages which the scripts need are installed.
"""

import importlib.util
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
if sys.path[:1] != [str(ROOT)]:
    sys.path.insert(0, str(ROOT))  # `version3_triton.kernels` and the like are those of this clone


def _root_of(script: Path) -> Path:
    """The clone that a script in a version's folder belongs to; ROOT for any other script."""
    folders = (folder for folder in script.parents if folder.name.startswith("version"))
    return next((folder.parent for folder in folders if (folder.parent / "common/__init__.py").is_file()), ROOT)


_root = _root_of(Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve())
if _root != ROOT:  # the link is lost, or PYTHONSAFEPATH is set, and the environment is that of another clone
    print(
        f"error: this script is part of {_root}, but `common` was found in {ROOT}: run `make setup` in {_root}, then "
        f"`source {_root}/.venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)


def _say_no_more_than_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say_no_more_than_interrupted  # Ctrl-C during the imports, which take seconds; later `cli.command` handles it

_missing = [name for name in ("torch", "numpy", "pydantic", "yaml") if importlib.util.find_spec(name) is None]
if _missing:
    print(
        f"error: {', '.join(_missing)} not found in this Python ({sys.executable}): run `make setup` in {ROOT}, then "
        f"`source {ROOT}/.venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)
