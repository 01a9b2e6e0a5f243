"""The faults of stages 1 to 4 in one program, repaired one after the other.

    python repairs.py --through 0 --num-steps 20
    python repairs.py --through 2 --num-steps 20

`--through N` repairs the faults of stages 1 to N; with 4 it is Version 3. The fault of stage 6 is not in it, because the harness
refuses a program that has it.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from dataclasses import replace
from importlib import import_module

from stages import Stage, StageOptions

import torch.nn as nn

PARTS = [import_module(path.stem).STAGE for path in sorted(Path(__file__).parent.glob("v3_stage[1-4]_*.py"))]


def change(model: nn.Module, options: StageOptions) -> None:
    for number, part in enumerate(PARTS, 1):
        part.change(model, replace(options, fixed=number <= options.through))


def replaced(options: StageOptions) -> StageOptions:
    for number, part in enumerate(PARTS, 1):
        options = part.replaced(replace(options, fixed=number <= options.through))
    return replace(options, name=f"repaired_through_{options.through}")


THROUGH = dict(type=int, choices=range(len(PARTS) + 1), default=0, help="repair the faults of stages 1 to N (default: 0, none)")
DEFAULTS = {name: value for part in PARTS for name, value in part.defaults.items()}
STAGE = Stage(__doc__, __file__, change, replaced, defaults=DEFAULTS, flags={"--through": THROUGH}, fixable=False)

if __name__ == "__main__":
    STAGE.main()
