"""Stage 1: "The loss is broken."

"I moved Version 3 into our code base and tidied it up a little. It runs, every parameter gets a
gradient, nothing is NaN, and the loss falls. But it starts in the hundreds (a wider model in the
thousands), where Version 1 starts near 7 on the same text, and it needs a long time to get down to
that. The kernels pass their tests. Is it the learning rate?"

    python v3_stage1_broken_loss.py --num-steps 50
    python v3_stage1_broken_loss.py --diagnose
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

from stages import Parts, Stage

import torch.nn as nn


def tidy(model: nn.Module) -> None:
    """The model without `weights.initialize` at the end of TinyLlama.__init__: "PyTorch's modules
    initialize themselves".
    """
    for module in model.modules():
        # The head's weight is the embedding's.
        if isinstance(module, nn.Linear | nn.Embedding) and module is not model.lm_head:
            module.reset_parameters()


STAGE = Stage(__doc__, __file__, Parts(change=tidy))

# A handout ends here.
STAGE.fix = Parts()

if __name__ == "__main__":
    STAGE.main()
