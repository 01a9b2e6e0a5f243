"""Everything that is the same in every version of the model; the model and its operations live in the version folders.

Each folder with scripts has a link to this one, so that its scripts find it from any directory and use the copy that they came
with. What they need from other packages is asked for here, before anything else is imported.
"""

import importlib.util
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for `version3_triton.kernels` and the like


def _say_no_more_than_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say_no_more_than_interrupted  # Ctrl-C while the imports take their seconds; later `cli.command` sees to it

_missing = [name for name in ("torch", "numpy", "pydantic", "yaml") if importlib.util.find_spec(name) is None]
if _missing:
    print(
        f"error: {', '.join(_missing)} not found in this Python ({sys.executable}): run `make setup` in {ROOT}, then "
        f"`source {ROOT}/.venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)
