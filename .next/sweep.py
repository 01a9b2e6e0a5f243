"""sweep.py TREE OUT [PRODUCT SHARE]: us of each product of eight texts at large by tile, in captured chains; with PRODUCT, a
share of its tiles is compiled and nothing is written."""
import importlib.util, json, statistics, sys
import torch
import torch.nn.functional as F
sys.path[:0] = ["/tmp/tree"]
spec = importlib.util.spec_from_file_location("kernels_of_tree", sys.argv[1] + "/decoding/decode_kernels.py")
K = sys.modules["kernels_of_tree"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(K)
FOLDED = hasattr(K, "Stream")
B, D, I, QKV, V = 8, 2048, 5632, 2560, 32000
SHAPES = {"qkv": (QKV, D, 1), "o": (D, D, 0), "gate_up": (2 * I, D, 1), "down": (D, I, 0), "head": (V, D, 1)}
TILES = [(16, 64, 4, 4, 3), (16, 64, 4, 4, 4), (16, 128, 4, 4, 3), (16, 128, 4, 4, 4), (16, 128, 4, 4, 6), (16, 64, 4, 4, 6), (16, 64, 8, 8, 4), (16, 128, 8, 8, 3),
         (16, 256, 2, 2, 4), (16, 256, 2, 2, 6), (16, 128, 2, 2, 6), (32, 128, 4, 4, 3), (32, 128, 4, 4, 4), (32, 64, 4, 4, 6),
         (32, 64, 8, 8, 4), (32, 128, 2, 4, 4), (64, 64, 4, 4, 4), (64, 128, 2, 4, 3), (64, 64, 2, 4, 6)]
only = sys.argv[3] if len(sys.argv) > 3 else None
share = int(sys.argv[4]) if only else None

def clock(call, n):
    for _ in range(2): call()
    torch.cuda.synchronize()
    if only: return 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): call()
    times = []
    for _ in range(3): graph.replay()
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); b.synchronize(); times.append(a.elapsed_time(b))
    return statistics.median(times) * 1e3 / n

found = {}
with torch.no_grad():
    for name, (rows, size, norm) in SHAPES.items():
        if only and name != only: continue
        n = 24 if name != "head" else 4
        weights = [torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) / 50 for _ in range(n)]
        x = torch.randn(B, size, device="cuda", dtype=torch.bfloat16)
        module = torch.nn.RMSNorm(size if norm else rows, 1e-5, device="cuda", dtype=torch.bfloat16)
        out = torch.zeros(B, rows, device="cuda", dtype=torch.bfloat16)
        if FOLDED:
            # as many sums as a product with 16 rows a program hands on
            stream = K.Stream(x, x * module.weight, x.float().square().unflatten(1, (128, -1)).sum(2).contiguous()) if norm else K.Stream(out, out.clone(), None)
            def own():
                for w in weights: y = K.product(name, stream, w, module) if norm else K.add(name, x, w, stream, module)
                return y
        else:
            def own():
                for w in weights: y = K.product(name, x, w, module if norm else None, None if norm else out)
                return y
        found[name] = {}
        def time(tile):
            K.BATCH_TILES[name] = tile
            try: found[name][str(tile)] = clock(own, n)
            except Exception as error: found[name][str(tile)] = repr(error)[:80]
        first = [tile + (512,) for tile in TILES]
        rest = [tile + (ahead,) for tile in TILES for ahead in (0, 2048)]
        if only:
            for tile in (first + rest)[share::3]: time(tile)
            continue
        for tile in first: time(tile)
        ranked = sorted((v, k) for k, v in found[name].items() if isinstance(v, float))
        for _, tile in ranked[:3]:
            for ahead in (0, 2048): time(eval(tile)[:5] + (ahead,))
        ranked = sorted((v, k) for k, v in found[name].items() if isinstance(v, float))
        error = None
        if norm:
            K.BATCH_TILES[name] = eval(ranked[0][1])
            y = own()
            r = F.rms_norm(x.float(), (size,), module.weight.float(), 1e-5) @ weights[-1].float().t()
            if name == "gate_up": r = F.silu(r[:, :I]) * r[:, I:]
            error = ((y.float() - r).abs().max() / r.abs().max()).item()
        print(sys.argv[1], name, [(round(v, 2), k) for v, k in ranked[:5]], "error", error, flush=True)
        del weights
if not only:
    tiles = {n: eval(min((v, k) for k, v in d.items() if isinstance(v, float))[1]) for n, d in found.items()}
    json.dump({"products": found, "tiles": tiles}, open(sys.argv[2], "w"), indent=1)
