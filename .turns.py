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
N16 = {"V4_NORM": "1024,16"}
SW = {"V4_TILE_SWIGLU_BACKWARD": "64,64,256,4,2"}
LONG = {"base": ({}, ""), "halves": ({}, "halves"), "late": ({}, "late"), "norm16": (N16, "norm")}
VARIANTS = {
    "tiny": {
        "base": ({}, ""), "order": ({}, "order"),
        "norm16+prefetch": (N16, "norm,prefetch"),
        "norm16+prefetch+late": (N16, "norm,prefetch,late"),
        "norm16+prefetch+order": (N16, "norm,prefetch,order"),
        "norm16+prefetch+halves": (N16, "norm,prefetch,halves"),
        "norm16+prefetch+swiglu": (N16 | SW, "norm,prefetch,swiglu"),
        "norm16+prefetch+order+swiglu": (N16 | SW, "norm,prefetch,order,swiglu"),
    },
    "small": {
        "base": ({}, ""), "pack": ({}, "pack"), "late": ({}, "late"), "halves": ({}, "halves"),
        "pack+late": ({}, "pack,late"), "pack+halves": ({}, "pack,halves"), "pack+halves+late": ({}, "pack,halves,late"),
        "pack+halves+order": ({}, "pack,halves,order"),
        "pack+late+norm16+prefetch": (N16, "pack,late,norm,prefetch"),
        "pack+halves+norm16+prefetch": (N16, "pack,halves,norm,prefetch"),
        "pack+late+norm512+prefetch": ({"V4_NORM": "512,16"}, "pack,late,norm,prefetch"),
    },
    "medium": LONG, "large": LONG,
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
count, turns = {"tiny": (60, 30), "small": (25, 30), "medium": (4, 14), "large": (2, 8)}[preset]
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
