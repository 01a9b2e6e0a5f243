"""batch_products.py OUT [PRODUCT]: us of a product of eight texts at large's shapes, with the norm inside: cuBLAS, and a pipelined
kernel by tile. It was written down again after its run, from the session's record of it.
"""
import json, statistics, sys
import torch, triton
sys.path[:0] = ["/tmp/tree"]
from decoding import decode_kernels
from version3_triton.kernels.dependent_launch import dependent
piped = decode_kernels._batch_product
B, D, I, QKV, V = 8, 2048, 5632, 2560, 32000
shapes = {"qkv": (QKV, D, 1), "o": (D, D, 0), "gate_up": (2 * I, D, 1), "down": (D, I, 0), "head": (V, D, 1)}
tiles = [(r, b, w, s) for r, b, w in [(16, 256, 2), (16, 256, 4), (16, 512, 2), (16, 512, 4), (16, 1024, 4), (32, 128, 4), (32, 256, 4), (32, 512, 4), (64, 128, 4), (64, 256, 4), (8, 512, 4)] for s in (3, 4, 6)]
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
    g = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(B, rows, device="cuda", dtype=torch.bfloat16)
    wt = [w.t() for w in ws]
    def lib():
        for w in wt: torch.mm(x, w, out=y)
    found[name] = {"limit": rows * size * 2 / 4.23e6, "cublas": clock(lib, n)}
    out_rows = rows // 2 if name == "gate_up" else rows
    z = torch.zeros(B, out_rows, device="cuda", dtype=torch.bfloat16)
    for tile in tiles:
        if name == "gate_up" and (2 * tile[0] * tile[1] + 16 * tile[1]) * 2 * (tile[3] - 1) > 220e3: continue
        gain = g if norm else None
        def own():
            for w in ws:
                piped[(triton.cdiv(out_rows, tile[0]),)](x, gain, w, z, out_rows, 1e-5, SIZE=size, NORM=gain is not None, GATED=name == "gate_up",
                    ADD=not norm, ROWS=tile[0], BLOCK=tile[1], BATCH=B, TEXTS=16, num_stages=tile[3], num_warps=tile[2], **dependent())
        try:
            found[name][str(tile)] = clock(own, n)
        except Exception as e:
            found[name][str(tile)] = repr(e)[:100]
json.dump(found, open(sys.argv[1], "w"), indent=1)
