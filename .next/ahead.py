"""ahead.py OUT [PRODUCT]: us of each product of eight texts at large, by tile and by the columns that the L2 fetches before
the wait; then ms of a captured step with main's tiles and with the best ones, in turns."""
import json, statistics, sys
import torch, triton
import torch.nn.functional as F
sys.path[:0] = ["/tmp/ahead"]
from common import cli, device as devices
from common.options import Options
from common.timing import benchmark
from decoding import generate, decode_kernels as K
B, D, I, QKV, V = 8, 2048, 5632, 2560, 32000
SHAPES = {"qkv": (QKV, D, 1), "o": (D, D, 0), "gate_up": (2 * I, D, 1), "down": (D, I, 0), "head": (V, D, 1)}
TILES = [(16, 256, 2, 4), (16, 256, 2, 6), (16, 512, 2, 3), (16, 512, 2, 4), (16, 512, 2, 6), (32, 256, 2, 4), (32, 256, 2, 6),
         (32, 128, 4, 4), (32, 128, 4, 6), (64, 128, 4, 3), (64, 128, 4, 6)]
AHEAD = [(), (0,), (512,), (2048,)]

def clock(call, n):
    for _ in range(2): call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): call()
    times = []
    for _ in range(3): graph.replay()
    for _ in range(12):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); b.synchronize(); times.append(a.elapsed_time(b))
    return statistics.median(times) * 1e3 / n

only = sys.argv[2] if len(sys.argv) > 2 else None
found = {}
for name, (rows, size, norm) in SHAPES.items():
    if only and name != only: continue
    n = 24 if name != "head" else 4
    weights = [torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) / 50 for _ in range(n)]
    x = torch.randn(B, size, device="cuda", dtype=torch.bfloat16)
    module = torch.nn.RMSNorm(size, 1e-5, device="cuda", dtype=torch.bfloat16) if norm else None
    out = None if norm else torch.zeros(B, rows, device="cuda", dtype=torch.bfloat16)
    found[name] = {}
    for tile in TILES:
        for ahead in AHEAD:
            K.BATCH_TILES[name] = tile + ahead
            def own():
                for w in weights: y = K.product(name, x, w, module, out)
                return y
            try:
                with torch.no_grad(): found[name][str(tile + ahead)] = clock(own, n)
            except Exception as error:
                found[name][str(tile + ahead)] = repr(error)[:80]
    if norm:
        K.BATCH_TILES[name] = (32, 128, 4, 4, 512)
        with torch.no_grad(): y = own()
        r = F.rms_norm(x.float(), (size,), None, 1e-5) @ weights[-1].float().t()
        if name == "gate_up": r = F.silu(r[:, :I]) * r[:, I:]
        found[name]["error"] = ((y.float() - r).abs().max() / r.abs().max()).item()
    best = sorted((v, k) for k, v in found[name].items() if isinstance(v, float) and k.startswith("("))
    if not only: print(name, [(round(v, 2), k) for v, k in best[:5]], "main:", min((v, k) for v, k in best if k.count(",") == 3), found[name].get("error"), flush=True)
if only: sys.exit()
before = {"qkv": (32, 256, 2, 6), "o": (16, 512, 2, 6), "gate_up": (64, 128, 4, 6), "down": (16, 512, 2, 5), "head": (64, 128, 4, 6)}
after = {n: eval(min((v, k) for k, v in d.items() if isinstance(v, float) and k.startswith("("))[1]) for n, d in found.items()}
arguments = cli.parse(generate.parser(), ["--preset", "large", "--prompt-tokens", "512"])
decoder = generate.Decoder("fused", cli.resolve(Options, arguments), B, 1024, torch.bfloat16)
decoder.prefill(torch.randint(32000, (B, 512), device="cuda"))
steps = {}
for turn in range(3):
    for which, tiles in (("main", before), ("ahead", after)):
        K.BATCH_TILES = tiles
        decoder.positions.fill_(512)
        step = devices.capture_graph(decoder.step)
        decoder.positions.fill_(512)
        steps.setdefault(which, []).append(statistics.median(benchmark(step, decoder.device, 5, 120)))
print(after, steps, flush=True)
json.dump({"products": found, "tiles": {n: list(t) for n, t in after.items()}, "steps": steps}, open(sys.argv[1], "w"), indent=1)
