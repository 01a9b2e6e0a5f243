"""Stage 5: the real Version 3, with nothing replaced: what the other stages are held against.

python v3_stage5_optimized.py --num-steps 50
"""

import sys
from functools import partial

import stages

add_arguments = partial(stages.add_arguments, has_fix=False)


if __name__ == "__main__":
    stages.main(sys.modules[__name__])
