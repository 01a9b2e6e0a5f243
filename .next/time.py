"""time.py PRESETS FLAGS...: median ms of Version 4's captured step, of each preset; one process. FP8 with --enable-fp8."""
import argparse, json, sys, time
import torch
from common import cli, device as devices, weights
from common.options import RunOptions
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import capture, preparation
from studies import version_files
from version4_ultra_fused import tiny_llama_v4
presets, flags = sys.argv[1].split(","), sys.argv[2:]
found = {}
for preset in presets:
    sys.argv = ["trial", "--preset", preset, "--use-amp", *flags]
    parser = argparse.ArgumentParser()
    for add in (cli.add_model_flags, cli.add_training_flags, cli.add_profiling_flags):
        add(parser)
    cli.add_switches(parser, tiny_llama_v4.SWITCHES)
    options = cli.resolve(RunOptions, cli.parse(parser), tiny_llama_v4.SWITCHES)
    device = devices.select("auto")
    precision = Precision(device, torch.bfloat16)
    torch.manual_seed(0)
    batch = version_files.random_batch(options, device)
    with weights.drawn_on(device):
        torch.manual_seed(0)
        model = preparation.move_model(tiny_llama_v4.make_model(options), device, "none")
    optimizer = preparation.capturable(tiny_llama_v4.make_optimizer(model, options), precision)
    step = tiny_llama_v4.make_step(model, optimizer, precision)
    with devices.stream_before_capture():
        for _ in range(3):
            step(batch)
    captured = capture.CapturedStep(step, batch)
    losses = [captured(batch).item() for _ in range(5)]
    run = lambda: captured(batch)
    long = preset in ("medium", "large")
    benchmark(run, device, 0, 10, 2.0 if long else 0.3)
    ms = summarize(benchmark(run, device, 0, 10 if long else 100, 2.0 if long else 1.0))
    found[preset] = {"ms": ms["median"], "losses": losses, "gib": captured.peak_bytes / 2**30}
    del captured, step, model, optimizer
    torch.cuda.empty_cache()
print(json.dumps(found))
