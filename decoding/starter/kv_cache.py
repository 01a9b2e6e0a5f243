"""The problems of ../README.md: the KV cache, attention of one query, and the bytes of a token.

Replace each line that names its problem, and run `pytest test_exercises.py` in the folder above.
With KERNEL_EXERCISES=starter in front, `python generate.py` writes text with your functions. No
shape may depend on the position, which the host may not read.
"""

from common.config import ModelConfig

from torch import Tensor


def append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Writes keys and values of S tokens, [B, K, S, Dh], into the cache at their positions, [S].

    The cache has two tensors [B, K, T, Dh].
    """
    raise NotImplementedError("append: problem 1 of README.md")


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """One query, [B, H, 1, Dh], to the cached keys up to its own position, [1] -> [B, H, 1, Dh].

    Query head h reads key/value head h // (H / K).
    """
    raise NotImplementedError("attend: problem 1 of README.md")


def token_bytes(config: ModelConfig, length: int, itemsize: int) -> tuple[int, int]:
    """Bytes that the next token reads once: of all weights, and of a cache of `length` tokens.

    A number has `itemsize` bytes.
    """
    raise NotImplementedError("token_bytes: problem 2 of README.md")
