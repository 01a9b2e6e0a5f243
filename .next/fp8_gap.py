"""fp8_gap.py: Version 4's captured step in FP8 at large, ms, clock and watts: of a random batch and of one that can be
learned (half of its tokens are the one before plus one), with two learning rates. Which of them makes the trial's 72.8 ms?"""
import argparse, json, statistics, subprocess, sys, threading, time
import torch
from common import cli, device as devices, weights
from common.options import RunOptions
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import capture, preparation
from studies import version_files
from version4_ultra_fused import tiny_llama_v4

def sampled(run):
    """ms of the steps, and medians of MHz and W while they run."""
    rows, ended = [], threading.Event()
    def sample():
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant,temperature.gpu", "--format=csv,noheader,nounits", "-i", "0"]
        while not ended.is_set():
            rows.append([float(x) for x in subprocess.run(query, capture_output=True, text=True).stdout.split(",")])
            time.sleep(0.1)
    thread = threading.Thread(target=sample); thread.start()
    ms = summarize(benchmark(run, device, 0, 10, 3.0))
    ended.set(); thread.join()
    mhz, watts, celsius = (statistics.median(column) for column in zip(*rows))
    return {"ms": ms["median"], "p20": ms["p20"], "p80": ms["p80"], "mhz": mhz, "watts": watts, "celsius": celsius}

found = []
for fp8 in ("--enable-fp8", None):
  for kind in ("random", "learned"):
    for rate in ("3e-4", "1e-5"):
        sys.argv = ["trial", "--preset", "large", "--use-amp", "--learning-rate", rate, *([fp8] if fp8 else [])]
        parser = argparse.ArgumentParser()
        for add in (cli.add_model_flags, cli.add_training_flags, cli.add_profiling_flags): add(parser)
        cli.add_switches(parser, tiny_llama_v4.SWITCHES)
        options = cli.resolve(RunOptions, cli.parse(parser), tiny_llama_v4.SWITCHES)
        device = devices.select("auto")
        precision = Precision(device, torch.bfloat16)
        torch.manual_seed(0)
        ids, targets = version_files.random_batch(options, device)
        if kind == "learned":
            whole = torch.cat([ids, targets[:, -1:]], dim=1)
            whole[:, 1::2] = ((whole[:, :-1:2] + 1) % options.model.vocab_size)[:, : whole[:, 1::2].shape[1]]
            ids, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        batch = ids, targets
        with weights.drawn_on(device):
            torch.manual_seed(0)
            model = preparation.move_model(tiny_llama_v4.make_model(options), device, "none")
        optimizer = preparation.capturable(tiny_llama_v4.make_optimizer(model, options), precision)
        step = tiny_llama_v4.make_step(model, optimizer, precision)
        with devices.stream_before_capture():
            for _ in range(3): step(batch)
        captured = capture.CapturedStep(step, batch)
        row = {"fp8": bool(fp8), "batch": kind, "lr": rate, "first_loss": captured(batch).item()}
        run = lambda: captured(batch)
        benchmark(run, device, 0, 10, 2.0)
        row |= sampled(run)
        row["last_loss"] = captured(batch).item()
        found.append(row); print(row, flush=True)
        del captured, step, model, optimizer
        torch.cuda.empty_cache()
json.dump(found, open("/tmp/out/fp8_gap.json", "w"), indent=1)
