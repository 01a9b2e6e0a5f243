"""batch_products.py OUT [WARM]: us of a product of eight texts at large's shapes: cuBLAS, and a pipelined kernel by tile."""
import json, statistics, sys, os
import torch, triton
import triton.language as tl
import torch.nn.functional as F
sys.path[:0] = ["/tmp/tree"]
from concurrent.futures import ThreadPoolExecutor

B = 8
D, I, QKV, V = 2048, 5632, 3072, 32000
from decoding import generate, decode_kernels
from version3_triton.kernels.dependent_launch import dependent
piped = decode_kernels._batch_product
D, I, QKV, V = 2048, 5632, 2560, 32000
shapes = {"qkv": (QKV, D, 1), "o": (D, D, 0), "gate_up": (2 * I, D, 1), "down": (D, I, 0), "head": (V, D, 1)}
print(shapes, flush=True)
tiles = [(16, 256, 2, 6), (16, 512, 2, 4), (16, 512, 2, 5), (16, 512, 2, 6), (16, 512, 1, 5), (32, 256, 4, 6), (32, 256, 2, 6), (32, 256, 4, 4), (32, 512, 4, 4), (32, 128, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 4)]
tiles = [t for t in tiles if (t[0] * t[1] + 16 * t[1]) * 2 * (t[3] - 1) < 220e3]

def clock(call, n):
    for _ in range(2): call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): call()
    ts = []
    for _ in range(3): graph.replay()
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return statistics.median(ts) * 1e3 / n

only = sys.argv[2] if len(sys.argv) > 2 else None
found = {}
for name, (rows, size, norm) in shapes.items():
    if only and name != only: continue
    n = 24 if name != "head" else 4
    ws = [torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) / 50 for _ in range(n)]
    x = torch.randn(B, size, device="cuda", dtype=torch.bfloat16)
    module = torch.nn.RMSNorm(size, 1e-5, device='cuda', dtype=torch.bfloat16)
    g = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(B, rows, device="cuda", dtype=torch.bfloat16)
    wt = [w.t() for w in ws]
    def lib():
        for w in wt: torch.mm(x, w, out=y)
    limit = rows * size * 2 / 4.23e6
    found[name] = {"limit": limit, "cublas": clock(lib, n)}
    if name in ("o", "down"):
        def add():
            for w in wt: y.addmm_(x, w)
        found[name]["cublas add"] = clock(add, n)
    out_rows = rows // 2 if name == "gate_up" else rows
    z = torch.zeros(B, out_rows, device="cuda", dtype=torch.bfloat16)
    for tile in tiles:
        if name == "gate_up" and (2 * tile[0] * tile[1] + 16 * tile[1]) * 2 * (tile[3] - 1) > 220e3: continue
        for early in (False, True):
            def own():
                for w in ws:
                    if norm: xx = decode_kernels.normalized(x, module)
                    else: xx = x
                    piped[(triton.cdiv(out_rows, tile[0]),)](xx, w, z, out_rows, SIZE=size, GATED=name == "gate_up",
                        ADD=not norm, ROWS=tile[0], BLOCK=tile[1], BATCH=B, TEXTS=16, EARLY=early, num_stages=tile[3], num_warps=tile[2], **dependent())
            try:
                found[name][str(tile) + ("e" if early else "")] = clock(own, n)
            except Exception as e:
                found[name][str(tile) + ("e" if early else "")] = repr(e)[:100]
    if norm:
        z.zero_()
        tile, early = (32, 128, 4, 4), True
        own()
        r = torch.nn.functional.rms_norm(x.float(), (size,), None, 1e-5) @ ws[-1].float().t()
        if name == "gate_up": r = F.silu(r[:, :out_rows]) * r[:, out_rows:]
        found[name]["error"] = ((z.float() - r).abs().max() / r.abs().max()).item()
    best = sorted((v, k) for k, v in found[name].items() if isinstance(v, float) and k.startswith("("))[:6]
    if not only: print(name, {k: v for k, v in found[name].items() if not k.startswith("(") or isinstance(v, str)}, best, flush=True)
json.dump(found, open(sys.argv[1], "w"), indent=1)

if not only:
    import re
    best = {}
    for early in (False, True):
        chosen = {}
        for name, times in found.items():
            ok = [(v, k) for k, v in times.items() if isinstance(v, float) and k.startswith("(") and k.endswith("e") == early]
            chosen[name] = min(ok)
        best[sum(v * (1 if name == "head" else 22) for name, (v, _) in chosen.items())] = (early, {n: k.rstrip("e") for n, (_, k) in chosen.items()})
    print(best)
    early, picked = best[min(best)]
    path = "/tmp/tree/decoding/decode_kernels.py"
    text = open(path).read()
    a, b = text.index("BATCH_TILES = {"), text.index("TEXTS = 16")
    text = text[:a] + "BATCH_TILES = {" + ", ".join(f'"{n}": {t}' for n, t in picked.items()) + "}\n" + text[b:]
    text = text.replace("EARLY: tl.constexpr = True", f"EARLY: tl.constexpr = {early}")
    open(path, "w").write(text)
