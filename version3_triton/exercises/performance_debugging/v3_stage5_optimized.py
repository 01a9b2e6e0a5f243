"""Stage 5: the real Version 3, with nothing replaced. The other stages are compared with it.

python v3_stage5_optimized.py --num-steps 50
"""

import sys

import stages

HAS_FIX = False


if __name__ == "__main__":
    stages.main(sys.modules[__name__])
