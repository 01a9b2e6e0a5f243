"""turns PRESET NUMBER: every variant captured in one process, timed in turns."""
import argparse, json, os, statistics, sys, time
from pathlib import Path
import torch
from common import cli, device as devices, weights
from common.options import RunOptions
from common.precision import Precision
from common.training import capture, preparation
from studies import version_files
from version4_ultra_fused import tiny_llama_v4, trials
from version4_ultra_fused.kernels import short_attention, tiles

preset, number = sys.argv[1], int(sys.argv[2])
OUT = Path(os.environ["OUT"])
VARIANTS = {
    "tiny": {
        "base": ({}, ""), "order": ({}, "order"), "late": ({}, "late"), "sort": ({}, "sort"), "halves": ({}, "halves"),
        "norm8": ({"V4_NORM": "1024,8"}, "norm"), "norm16": ({"V4_NORM": "1024,16"}, "norm"), "prefetch": ({}, "prefetch"),
        "swiglu256": ({"V4_TILE_SWIGLU_BACKWARD": "64,64,256,4,2"}, "swiglu"),
        "norm+prefetch": ({"V4_NORM": "1024,8"}, "norm,prefetch"),
        "norm+prefetch+order": ({"V4_NORM": "1024,8"}, "norm,prefetch,order"),
        "norm+prefetch+order+sort": ({"V4_NORM": "1024,8"}, "norm,prefetch,order,sort"),
        "norm+prefetch+order+swiglu": ({"V4_NORM": "1024,8", "V4_TILE_SWIGLU_BACKWARD": "64,64,256,4,2"}, "norm,prefetch,order,swiglu"),
    },
    "small": {
        "base": ({}, ""), "late": ({}, "late"), "order": ({}, "order"), "halves": ({}, "halves"), "sort": ({}, "sort"),
        "pack32": ({"rows": 32, "warps": 1}, "pack"), "pack32 w2": ({"rows": 32, "warps": 2}, "pack"), "pack64": ({"rows": 64, "warps": 4}, "pack"), "pack64 w2": ({"rows": 64, "warps": 2}, "pack"),
        "prefetch": ({}, "prefetch"), "norm": ({"V4_NORM": "512,16"}, "norm"),
        "halves+late": ({}, "halves,late"),
        "pack32+late": ({"rows": 32, "warps": 1}, "pack,late"),
        "pack32+halves": ({"rows": 32, "warps": 1}, "pack,halves"),
        "pack32+halves+late": ({"rows": 32, "warps": 1}, "pack,halves,late"),
        "pack32+prefetch+norm": ({"rows": 32, "warps": 1, "V4_NORM": "512,16"}, "pack,prefetch,norm"),
        "pack32+halves+prefetch+norm": ({"rows": 32, "warps": 1, "V4_NORM": "512,16"}, "pack,halves,prefetch,norm"),
        "pack32+halves+late+prefetch+norm": ({"rows": 32, "warps": 1, "V4_NORM": "512,16"}, "pack,halves,late,prefetch,norm"),
    },
}[preset]
sys.argv = ["trial", "--preset", preset, "--use-amp"]
parser = argparse.ArgumentParser()
for add in (cli.add_model_flags, cli.add_training_flags, cli.add_profiling_flags):
    add(parser)
cli.add_switches(parser, tiny_llama_v4.SWITCHES)
options = cli.resolve(RunOptions, cli.parse(parser), tiny_llama_v4.SWITCHES)
device = devices.select("auto")
precision = Precision(device, torch.bfloat16)
torch.manual_seed(0)
batch = version_files.random_batch(options, device)
steps, losses = {}, {}
names = list(VARIANTS)
for name in names[number % len(names):] + names[:number % len(names)]:
    environment, on = VARIANTS[name]
    for key in ("V4_NORM", "V4_TILE_SWIGLU_BACKWARD"):
        os.environ.pop(key, None)
    os.environ.update({k: v for k, v in environment.items() if k.startswith("V4")})
    short_attention.ROWS, short_attention.WARPS = environment.get("rows", 64), environment.get("warps", 4)
    tiles.product_tile.cache_clear()
    trials.ON = frozenset(filter(None, on.split(",")))
    try:
        with weights.drawn_on(device):
            torch.manual_seed(0)
            model = preparation.move_model(tiny_llama_v4.make_model(options), device, "none")
        optimizer = preparation.capturable(tiny_llama_v4.make_optimizer(model, options), precision)
        step = tiny_llama_v4.make_step(model, optimizer, precision)
        with devices.stream_before_capture():
            for _ in range(3):
                step(batch)
        steps[name] = capture.CapturedStep(step, batch)
        losses[name] = [steps[name](batch).item() for _ in range(5)]
    except Exception as error:
        print("FAILED", name, repr(error)[-200:], flush=True)
end = time.perf_counter() + 1.5
while time.perf_counter() < end:
    for captured in steps.values():
        captured(batch)
    torch.cuda.synchronize()
found = {name: [] for name in steps}
count, turns = (60 if preset == "tiny" else 25), 40
names = list(steps)
for turn in range(turns):
    for place in range(len(names)):
        name = names[(place * 7 + turn) % len(names)] if len(names) % 7 else names[(place + turn) % len(names)]
        captured = steps[name]
        for _ in range(3):
            captured(batch)
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(count):
            captured(batch)
        b.record()
        torch.cuda.synchronize()
        found[name].append(a.elapsed_time(b) / count)
middle = {name: statistics.median(v) for name, v in found.items()}
(OUT / f"turns_{preset}_{number}.json").write_text(json.dumps({"ms": middle, "losses": losses}))
