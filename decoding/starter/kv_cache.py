"""The problems of ../README.md: the KV cache, attention of one query to it, and the bytes that a
token needs.

Replace each line that names its problem, and run `pytest test_exercises.py` in the folder above.
With KERNEL_EXERCISES=starter in front, `python generate.py` writes text with your functions. No
shape may depend on the position, which the host may not read.
"""

from common.config import ModelConfig

from torch import Tensor


def append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Writes the keys and values of S tokens, [1, K, S, Dh], into the cache, [K, T, Dh], at their
    positions, [S].
    """
    raise NotImplementedError("append: problem 1 of README.md")


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """One query, [1, H, 1, Dh], to the cached keys up to its own position, [1] -> [1, H, 1, Dh].

    Query head h reads key/value head h // (H / K).
    """
    raise NotImplementedError("attend: problem 1 of README.md")


def token_bytes(config: ModelConfig, length: int, itemsize: int) -> tuple[int, int]:
    """The bytes of all weights, and of the cache of `length` tokens, which the next token reads
    once; numbers of `itemsize`.
    """
    raise NotImplementedError("token_bytes: problem 2 of README.md")
