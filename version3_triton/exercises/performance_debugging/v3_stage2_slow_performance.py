"""Stage 2: "Correct, but slow."

"The losses are those of Version 1. For serving we hold keys and values as the cache of the
inference server does, the positions of a channel side by side, and every query head has its own, so
that one piece of code serves and trains. Then comes PyTorch's fused attention. And yet a step takes
longer than before, and with longer sequences memory runs out. What is left to fuse?"

    python v3_stage2_slow_performance.py --seq-len 1024 --num-steps 20 --profile-operators
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

from stages import Operations, Parts, Stage

import torch.nn.functional as F
from torch import Tensor


def as_in_the_cache(x: Tensor, groups: int) -> Tensor:
    """Keys or values [B, K, S, Dh] for each query head: [B, H, S, Dh], in memory [B, H, Dh, S]."""
    return x.transpose(-2, -1).repeat_interleave(groups, dim=1).transpose(-2, -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; q [B, H, S, Dh], k and v [B, K, S, Dh] -> [B, H, S, Dh]."""
    groups = q.shape[1] // k.shape[1]
    k = as_in_the_cache(k, groups)
    v = as_in_the_cache(v, groups)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def operations(table: Operations) -> Operations:
    return table._replace(attention=attention)


# There are grouped heads at every preset.
STAGE = Stage(__doc__, __file__, Parts(operations=operations), defaults={"num_kv_heads": 2})

# A handout ends here.


def attention_of_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, with the numbers of a key side by side in memory."""
    groups = q.shape[1] // k.shape[1]
    k, v = (as_in_the_cache(x, groups).contiguous() for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


STAGE.fix = Parts(operations=lambda table: table._replace(attention=attention_of_copies))

if __name__ == "__main__":
    STAGE.main()
