"""One small Triton kernel: `python -m common.triton_probe cuda` compiles and runs it on a GPU, and leaves it in Triton's cache.

With TRITON_INTERPRET=1, which Triton reads when it is imported, `cpu` interprets it. A wrong result is exit code 1.
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _scale(x_ptr, y_ptr, size, factor, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0)
    tl.store(y_ptr + place, factor * x, mask=place < size)


def main() -> None:
    x = torch.arange(1000.0, device=sys.argv[1])
    y = torch.empty_like(x)
    _scale[triton.cdiv(len(x), 256),](x, y, len(x), 3.0, BLOCK=256)
    if not torch.equal(y, 3 * x):
        sys.exit(f"triton {triton.__version__} computed a wrong result")
    print(triton.__version__)


if __name__ == "__main__":
    main()
