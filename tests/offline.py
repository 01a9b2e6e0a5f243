"""Compiles the kernels of a training step of Versions 3 and 4, and of a decode step, for a GPU that
is not there, and prints a JSON row for each.

    python -m tests.offline gfx942 bf16

A driver that compiles and does not run stands in for the GPU's, so this needs a process of its own.
Nothing is computed by the kernels: which of them a step launches, and with which sizes, follows
from shapes alone.
"""

import contextlib
import io
import json
import os
import re
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
# kernels are loaded where one could run
torch.cuda.is_available, _available = lambda: True, torch.cuda.is_available

from common.config import ModelConfig
from common.precision import Precision
from decoding import decode_kernels
from version3_triton import kernels, tiny_llama_v3
from version3_triton.kernels import launch_sizes
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.kernels import tiles
from version4_ultra_fused.kernels.fp8 import scales

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

torch.cuda.is_available = _available
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TARGETS = {
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")},
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
}
FP8 = {  # formats of x and of gradients, on the targets that multiply in them
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    **dict.fromkeys(("gfx950", "sm_90"), (torch.float8_e4m3fn, torch.float8_e5m2)),
}


def config(hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int = 1000) -> ModelConfig:
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
    }
    return ModelConfig(hidden_size=hidden, num_layers=1, max_sequence_length=256, **sizes)


# A model, B and S. The head dimensions are 64 and 128, then also 32, 80 and 16, and SwiGLU and the
# loss have odd and large sizes. Of the common two, Version 4 is compiled for the first alone, whose
# vocabulary is a multiple of 16, so that FP8 has the head.
WIDE = config(1024, 8, 4, 4096)
COMMON = [(config(512, 8, 4, 2048, 1008), 1, 128), (WIDE, 1, 16)]
LARGE = config(2048, 32, 4, 5632, 32000)
ALL = [
    *COMMON,
    (config(512, 8, 4, 2048), 8, 128),
    (config(256, 8, 8, 512), 8, 128),
    (config(1024, 8, 4, 4096), 1, 256),
    (config(240, 3, 3, 330, 251), 3, 17),
    (config(64, 4, 2, 128, 4096), 1, 16),
    (LARGE, 1, 32),
]


def resources(kernel: Any, ptxas_log: str) -> dict[str, int]:
    """Spilled registers (on NVIDIA bytes that are stored and loaded for them), and bytes of shared
    memory.
    """
    if "amdgcn" in kernel.asm:
        counted = re.findall(
            r"^ +(?:- )?\.[sv]gpr_spill_count: +(\d+)$", kernel.asm["amdgcn"], re.MULTILINE
        )
    else:
        counted = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_log)
    assert len(counted) == 2, ptxas_log
    return {"spills": sum(map(int, counted)), "shared_bytes": kernel.metadata.shared}


def step(
    version, model: torch.nn.Module, precision: Precision, batch: tuple[Tensor, Tensor]
) -> None:
    optimizer = version.make_optimizer(model, Namespace(learning_rate=1e-3))
    version.make_step(model, optimizer, precision)(batch)


def decode_step(config: ModelConfig, dtype: torch.dtype, batch: int) -> None:
    """The kernels of a step of `generate.py --operations fused`, with a cache of 640 tokens."""
    model = tiny_llama_v3.TinyLlama(config).to(dtype)
    shape = (config.num_layers, batch, config.num_key_value_heads, 640, config.head_dim)
    decoder = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        model=model,
        tables=(model.cos.float(), model.sin.float()),
        keys=torch.zeros(shape, dtype=dtype),
        values=torch.zeros(shape, dtype=dtype),
        ids=torch.zeros(batch, 640, dtype=torch.long),
        positions=torch.zeros(batch, dtype=torch.long),
    )
    one, write = decode_kernels.fused(decoder)
    write(one())


def scaled_product(a: Tensor, b: Tensor, *, out: Tensor | None = None, **_) -> Tensor:
    """What stands in for a product in FP8, which a CPU may not have."""
    return torch.zeros(len(a), b.shape[1], dtype=torch.bfloat16) if out is None else out.zero_()


def compile_all(
    target: str, dtypes: list[str], models: list[tuple[ModelConfig, int, int]]
) -> list[dict[str, Any]]:
    """A row for each kernel that is launched. Afterwards Triton's driver is still none that can
    launch.
    """
    rows: list[dict[str, Any]] = []
    logs: dict[str, str] = {}  # by a kernel's hash: within a process a kernel is compiled once

    def compile_only(
        self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        rows.append(
            {
                "kernel": self.fn.__name__,
                **place,
                **resources(kernel, logs.setdefault(kernel.hash, log.getvalue())),
            }
        )
        if self.fn.__name__.startswith("_linear_cross_entropy"):
            arguments[3].zero_()  # classes, which the kernel would have written

    gpu = TARGETS[target]
    triton.knobs.nvidia.dump_ptxas_log = True
    # There is no log of what an earlier run compiled.
    triton.knobs.compilation.always_compile = gpu.backend == "cuda"
    stand_in = SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        map_python_to_cpp_type=str,
    )
    driver.set_active(stand_in)
    run, JITFunction.run = JITFunction.run, compile_only
    tiles.multiprocessors = lambda: 132
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.version, "hip", gpu.backend == "hip"),
    ):
        torch.cuda.get_device_capability = lambda: divmod(gpu.arch, 10)
        launch_sizes.family()  # keeps what it finds
    kernels.INTERPRETED = True  # so that kernels run on a CPU's tensors
    scales.formats, torch._scaled_mm = lambda: FP8[target], scaled_product
    for dtype in dtypes:
        precision = Precision(torch.device("cpu"), None if dtype == "fp32" else DTYPES[dtype])
        for model, batch_size, length in models:
            place = {"target": target, "dtype": dtype, "hidden_size": model.hidden_size}
            ids, targets = torch.zeros(2, batch_size, length, dtype=torch.long)
            step(tiny_llama_v3, tiny_llama_v3.TinyLlama(model), precision, (ids, targets))
            variants: list[dict[str, bool]] = []  # of Version 4, which does not take fp16
            if dtype != "fp16" and (model is not WIDE or models is ALL):
                variants.append({})
                if dtype == "bf16":
                    variants.append({"fp32-residual-gradient": True})
                    variants.append({"bf16-moments": True})
                    if target in FP8 and ids.numel() % 16 == 0:
                        variants.append({"fp8": True})
            for variant in variants:
                fourth = tiny_llama_v4.TinyLlama(model, tiny_llama_v4.SWITCHES | variant)
                step(tiny_llama_v4, fourth, precision, (ids, targets))
        if dtype != "fp16":  # generate.py decodes in bf16, and in fp32 without it
            place = {"target": target, "dtype": dtype, "hidden_size": LARGE.hidden_size}
            for batch in (1, 8):
                decode_step(LARGE, DTYPES[dtype], batch)
    return rows


if __name__ == "__main__":
    name, formats, *which = sys.argv[1:]
    print(json.dumps(compile_all(name, formats.split(","), ALL if which else COMMON)))
