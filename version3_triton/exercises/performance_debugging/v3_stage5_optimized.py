"""Stage 5: the real Version 3, with nothing replaced. The other stages are compared with it.

python v3_stage5_optimized.py --num-steps 50
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from stages import Stage

STAGE = Stage(__doc__, __file__, fixable=False)

if __name__ == "__main__":
    STAGE.main()
