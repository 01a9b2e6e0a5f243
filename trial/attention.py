"""One attention of Version 4 at medium and large in bf16, forward and backward, as its kernels take it
(recorded as a graph): cuDNN, Version 3's kernels, FlashAttention-4 in any order and repeated.

    python .trial_attention.py --out attention_fa4.json

A process measures all ways in turns, ROUNDS times; err is the relative error (Euclidean norm) of out,
dq, dk and dv against float64, same_bits whether 21 runs give the same bits.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from common import device as devices
from version3_triton.kernels import flash_attention, reference

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"medium": (16, 512, 8, 4, 128), "large": (4, 2048, 32, 4, 64)}  # B, S, H, K, Dh
ROUNDS, TIMES, RUNS = 9, 10, 21


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return reference.attention(q, k, v)


def fa4(q, k, v, deterministic: bool = False):
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=True, deterministic=deterministic)[0].transpose(1, 2)


WAYS = {
    "cuDNN": cudnn,
    "Version 3": flash_attention.attention,
    "FlashAttention-4": fa4,
    "FlashAttention-4, deterministic": lambda *x: fa4(*x, deterministic=True),
}


def inputs(shape, dtype=torch.bfloat16):
    batch, length, heads, kv_heads, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (batch, length, heads + 2 * kv_heads, head_dim), (batch, length, heads, head_dim)
    qkv, dout = (torch.randn(s, generator=generator, device="cuda").bfloat16().to(dtype) for s in sizes)
    parts = qkv.split((heads, kv_heads, kv_heads), dim=2)  # strided, as in the model
    leaves = tuple(x.transpose(1, 2).detach().requires_grad_() for x in parts)
    return leaves, dout.transpose(1, 2)


def both(way, leaves, dout):
    out = way(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def exact(shape):
    """out, dq, dk, dv in float64, one sequence at a time."""
    leaves, dout = inputs(shape, torch.float64)
    rows = []
    for i in range(shape[0]):
        row = tuple(x[i : i + 1].detach().requires_grad_() for x in leaves)
        rows.append(both(reference.attention, row, dout[i : i + 1]))
    return [torch.cat(parts) for parts in zip(*rows)]


def seconds(replay) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    asked = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        batch, length, heads, _, head_dim = shape
        product = 2 * heads * head_dim * batch * length * (length + 1) // 2
        right = exact(shape)
        leaves, dout = inputs(shape)
        replays, facts = {}, {}
        for way in asked.ways:
            work = WAYS[way]
            start = time.perf_counter()
            try:
                first = both(work, leaves, dout)
                torch.cuda.synchronize()
                build = time.perf_counter() - start
                errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(first, right)]
                same = all(
                    torch.equal(a, b)
                    for _ in range(RUNS - 1)
                    for a, b in zip(both(work, leaves, dout), first)
                )

                def forward(work=work):
                    with torch.no_grad():
                        work(*leaves)

                replays[way] = (
                    devices.capture_graph(forward, TIMES),
                    devices.capture_graph(lambda work=work: both(work, leaves, dout), TIMES),
                )
            except Exception as error:
                print(f"{name:7} {way}: {type(error).__name__}: {str(error)[:400]}", flush=True)
                continue
            facts[way] = {"same_bits": same, "err": [round(e, 5) for e in errors], "build_s": round(build, 1)}
        times = {way: ([], []) for way in replays}
        for replay in [r for pair in replays.values() for r in pair] * 3:
            replay()
        for _ in range(ROUNDS):
            for way, pair in replays.items():
                for kept, replay in zip(times[way], pair):
                    kept.append(seconds(replay) / TIMES)
        for way, (forwards, boths) in times.items():
            fwd, all_of_it = median(forwards), median(boths)
            rows.append(
                {
                    "shape": name,
                    "way": way,
                    "fwd_us": round(fwd * 1e6, 1),
                    "both_us": round(all_of_it * 1e6, 1),
                    "both_us_range": [round(min(boths) * 1e6, 1), round(max(boths) * 1e6, 1)],
                    "tflops_both": round(7 * product / all_of_it / 1e12),
                    "tflops_fwd": round(2 * product / fwd / 1e12),
                    "bwd_tflops": round(5 * product / (all_of_it - fwd) / 1e12),
                }
                | facts[way]
            )
            print(json.dumps(rows[-1]), flush=True)
    packages = {}
    for package in ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "triton"):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    record = {
        "schema": "tiny-llama-attention-trial/1",
        "packages": packages,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": devices.describe(torch.device("cuda")),
        "environment": devices.environment(),
        "precision": {"compute": "bf16"},
    }
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps(record, indent=1)[:-2]
    Path(asked.out).write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


main()
