"""Stage 5: the real Version 3, with nothing replaced. The other stages are compared with it.

python v3_stage5_optimized.py --num-steps 50
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

from stages import Stage

STAGE = Stage(__doc__, __file__)

# A handout ends here.

if __name__ == "__main__":
    STAGE.main()
