"""steps.py OUT: ms of a captured step of eight texts at large, in turns: main's kernels, and those of /tmp/v1 and /tmp/v2 with
the tiles that sweep.py found, improved by the columns that the L2 fetches ahead. Writes the tiles into both trees."""
import importlib.util, json, pathlib, statistics, sys
import torch
sys.path[:0] = ["/tmp/tree"]
from common import cli, device as devices
from common.options import Options
from common.timing import benchmark
from decoding import generate

def load(name, tree):
    spec = importlib.util.spec_from_file_location(name, tree + "/decoding/decode_kernels.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

trees = {"main": "/tmp/tree", "parts": "/tmp/v1", "folded": "/tmp/v2"}
kernels = {n: load("kernels_" + n, t) for n, t in trees.items()}
for n in ("parts", "folded"):
    kernels[n].BATCH_TILES.update({k: tuple(v) for k, v in json.load(open(f"/tmp/out/sweep_{n}.json"))["tiles"].items()})
arguments = cli.parse(generate.parser(), ["--preset", "large", "--prompt-tokens", "512"])
decoder = generate.Decoder("fused", cli.resolve(Options, arguments), 8, 1024, torch.bfloat16)
decoder.prefill(torch.randint(32000, (8, 512), device="cuda"))
saved = decoder.ids.clone()

def measure(n, steps=120):
    decoder.one, decoder.write = kernels[n].fused(decoder)
    decoder.positions.fill_(512); decoder.ids.copy_(saved)
    step = devices.capture_graph(decoder.step)
    decoder.positions.fill_(512); decoder.ids.copy_(saved)
    return statistics.median(benchmark(step, decoder.device, 5, steps))

logits = {}
for n in kernels:
    decoder.positions.fill_(512); decoder.ids.copy_(saved)
    decoder.one, decoder.write = kernels[n].fused(decoder)
    logits[n] = decoder.one().float()
for n in ("parts", "folded"):
    print(n, "differs from main by", ((logits[n] - logits["main"]).abs().max() / logits["main"].abs().max()).item(), "same tokens:", (logits[n].argmax(1) == logits["main"].argmax(1)).sum().item(), "of 8", flush=True)
class Warps:
    """A kernel that is launched with another number of warps."""
    def __init__(self, kernel, warps): self.kernel, self.warps = kernel, warps
    def __getitem__(self, grid): return lambda *a, **k: self.kernel[grid](*a, **(k | {"num_warps": self.warps}))
attention = {n: K._attend for n, K in kernels.items()}
searched = {}
for n in ("parts", "folded"):
    K, products = kernels[n], json.load(open(f"/tmp/out/sweep_{n}.json"))["products"]
    best = min(measure(n, 60) for _ in range(3))
    searched[n] = {"start": best}
    for name in ("gate_up", "down", "o", "qkv", "head"):
        ranked = sorted((v, eval(k)) for k, v in products[name].items() if isinstance(v, float))
        tiles = list(dict.fromkeys(tile[:5] for _, tile in ranked))[:5]
        for tile in (tile + (ahead,) for tile in tiles for ahead in (512, 0, 2048)):
            old = K.BATCH_TILES[name]
            if tile == old: continue
            K.BATCH_TILES[name] = tile
            try: ms = min(measure(n, 60) for _ in range(2))
            except Exception as error: ms = 1e9
            searched[n][f"{name} {tile}"] = ms
            if ms < best * 0.998: best = ms
            else: K.BATCH_TILES[name] = old
    print(n, best, K.BATCH_TILES, flush=True)
    for chunk, warps in ((128, 8), (128, 4), (64, 8), (64, 4), (256, 8), (256, 4)):
        K.CHUNK, K._attend = (chunk, 64 << 10), Warps(attention[n], warps)
        try: searched[n][f"attention {chunk} {warps}"] = min(measure(n, 60) for _ in range(2))
        except Exception as error: searched[n][f"attention {chunk} {warps}"] = repr(error)[:80]
    K.CHUNK, K._attend = (128, 16 << 10), attention[n]
    print({k: v for k, v in searched[n].items() if "attention" in k}, flush=True)
turns = {n: [] for n in kernels}
for _ in range(5):
    for n in kernels: turns[n].append(measure(n))
print({n: [round(v, 4) for v in vs] for n, vs in turns.items()}, flush=True)
json.dump({"turns": turns, "searched": searched, "tiles": {n: K.BATCH_TILES for n, K in kernels.items()}}, open(sys.argv[1], "w"), indent=1)
for n in ("parts", "folded"):
    path = pathlib.Path(trees[n], "decoding/decode_kernels.py")
    text = path.read_text()
    start = text.index("BATCH_TILES = {"); end = text.index("}\n", start) + 2
    path.write_text(text[:start] + "BATCH_TILES = {\n" + "".join(f'    "{k}": {t},\n' for k, t in kernels[n].BATCH_TILES.items()) + "}\n" + text[end:])
