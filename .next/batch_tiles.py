"""batch_tiles.py OUT: ms of a captured decode step at large of eight texts, by BATCH_TILE (rows, columns, warps)."""
import json, statistics, sys
import torch
sys.path[:0] = ["/tmp/tree"]
from common import cli, device as devices
from common.options import Options
from common.timing import benchmark
from decoding import decode_kernels, generate
arguments = cli.parse(generate.parser(), ["--preset", "large", "--prompt-tokens", "512"])
decoder = generate.Decoder("fused", cli.resolve(Options, arguments), 8, 1024, torch.bfloat16)
prompts = torch.randint(32000, (8, 512), device="cuda")
decoder.prefill(prompts)
found = {}
for tile in [(16, 256, 2), (16, 256, 4), (16, 512, 2), (16, 512, 4), (16, 512, 8), (16, 128, 4), (32, 256, 4), (32, 512, 4), (32, 512, 8), (64, 256, 4), (64, 128, 4)]:
    decode_kernels.BATCH_TILE = tile
    try:
        decoder.positions.fill_(512)
        step = devices.capture_graph(decoder.step)
        decoder.positions.fill_(512)
        times = benchmark(step, decoder.device, 5, 120)
        found[str(tile)] = statistics.median(times)
    except Exception as error:
        found[str(tile)] = repr(error)[:200]
    print(tile, found[str(tile)], flush=True)
json.dump(found, open(sys.argv[1], "w"), indent=1)
