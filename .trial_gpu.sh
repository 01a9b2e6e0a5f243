#!/usr/bin/env bash
# Trials of Version 4's captured step at tiny and small, on one GPU, in less than LIMIT seconds (230 unless given).
# From the tree's root: OUT=some/folder bash .trial_gpu.sh. Results: $OUT/trials.{json,txt}, traces v4_PRESET_{base,all}.json.gz.
set -u
export OUT=${OUT:?a folder for the results}
mkdir -p "$OUT"
cat >.trial_worker.py <<'WORKER'
"""Worker of .trial_gpu.sh: check | time | trace PRESETS, or sweep PRESET; prints one JSON line."""
import fcntl, json, os, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import argparse
import torch
from torch import Tensor
from common import cli, device as devices, weights
from common.options import RunOptions
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import capture, preparation, profiler, study_step
from studies import version_files
from version4_ultra_fused import tiny_llama_v4, trials
from version4_ultra_fused.kernels import tiles

MODE, PRESETS, OUT = sys.argv[1], sys.argv[2].split(","), Path(os.environ["OUT"])
EXTRA = os.environ.get("TRIAL_EXTRA", "").split()
GPU = torch.cuda.is_available()


class Lock:
    """Shared for checks, exclusive for what is timed."""

    def __init__(self, exclusive: bool) -> None:
        self.file = open("/tmp/v4_trials.lock", "w")
        fcntl.flock(self.file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if GPU:
            torch.cuda.synchronize()
        self.file.close()


def options_of(preset: str) -> RunOptions:
    sys.argv = ["trial", "--preset", preset, "--use-amp", *EXTRA]
    parser = argparse.ArgumentParser()
    cli.add_model_flags(parser)
    cli.add_training_flags(parser)
    cli.add_profiling_flags(parser)
    cli.add_switches(parser, tiny_llama_v4.SWITCHES)
    return cli.resolve(RunOptions, cli.parse(parser), tiny_llama_v4.SWITCHES)


def prepared(preset: str):
    options = options_of(preset)
    device = devices.select(options.device)
    precision = Precision(device, torch.bfloat16 if options.use_amp else None)
    torch.manual_seed(0)
    batch = version_files.random_batch(options, device)
    with weights.drawn_on(device):
        torch.manual_seed(0)
        if MODE == "check" or not GPU:  # also compares the graph with the eager step
            found = study_step.prepare_for_study(tiny_llama_v4, options, precision, batch)
            return found.step, batch, device
        model = preparation.move_model(tiny_llama_v4.make_model(options), device, "none")
    optimizer = preparation.capturable(tiny_llama_v4.make_optimizer(model, options), precision)
    step = tiny_llama_v4.make_step(model, optimizer, precision)
    with devices.stream_before_capture():
        for _ in range(3):
            step(batch)
    return capture.CapturedStep(step, batch), batch, device


def run(preset: str) -> dict:
    found, batch, device = prepared(preset)
    result = {}
    losses = [found(batch).item() for _ in range(5)]
    result["losses"] = losses
    if MODE == "time":
        step = lambda: found(batch)
        benchmark(step, device, 0, 30, 0.3)
        result["ms"] = summarize(benchmark(step, device, 0, 100, 2.0 if preset == "medium" else 0.5))
    if MODE == "trace":
        name = os.environ.get("V4_NAME", "base")
        step = lambda: found(batch)
        benchmark(step, device, 0, 30)
        profiler.trace(step, OUT / f"v4_{preset}_{name}.json.gz", 2, shapes=False)
    return result


# ---------------------------------------------------------------------------------------- sweep

def captured_us(work, repeats: int = 40) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return round(sorted(times)[3], 2)


def sweep(preset: str) -> list:
    from version3_triton.kernels import flash_attention
    from version3_triton.kernels.launch_sizes import LaunchConfig
    from version4_ultra_fused.kernels import elementwise, matmul, norm, short_attention
    from version4_ultra_fused.kernels import matmul_norm_backward as mnb
    from version4_ultra_fused.kernels import matmul_swiglu_backward as msb
    from version4_ultra_fused.kernels.reference import Norm, Rope

    config = options_of(preset).model
    N, D, F, V = 1024, config.hidden_size, config.intermediate_size, config.vocab_size
    H, K, Dh = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    C = (H + 2 * K) * Dh
    bf = torch.bfloat16

    def new(*shape: int, dtype=bf) -> Tensor:
        return (torch.randn(*shape, device="cuda") * 0.05).to(dtype)

    x, stream, hidden, packed = new(N, D), new(N, D, dtype=torch.float32), new(N, F), new(N, C)
    wq, wo, wg, wd, head = new(C, D), new(D, D), new(2 * F, D), new(D, F), new(V, D)
    gates, logits, dhidden = new(N, 2 * F), new(N, V), new(N, F)
    cos, sin = new(128, Dh, dtype=torch.float32), new(128, Dh, dtype=torch.float32)
    rope = Rope(cos, sin, 128)
    plain = Rope(cos, sin, 128)
    weight = torch.ones(D, device="cuda")
    state = Norm(weight, x, torch.ones(N, device="cuda"))
    o, lse = new(N, D), torch.zeros(8 * H * 128, device="cuda")
    dots = torch.zeros(2, N, device="cuda")
    tiles.LARGEST = dict.fromkeys(tiles.LARGEST, 1 << 40)
    rows = []

    def tile(name, said, programs=1):
        os.environ[f"V4_TILE_{name.upper()}"] = ",".join(map(str, said))
        tiles.PROGRAMS = programs
        tiles.product_tile.cache_clear()

    jobs = []
    only = trials.ON

    def job(what, how, work, setup=lambda: None):
        jobs.append((what, how, work, setup))

    lib = "cuBLAS"
    job("qkv", lib, lambda: x @ wq.T)
    job("qkv", lib + " + rotate", lambda: elementwise.rotate(x @ wq.T, rope, (H + K) * Dh))
    job("o", lib, lambda: x @ wo.T)
    job("gate_up", lib, lambda: x @ wg.T)
    job("gate_up", lib + " + swiglu", lambda: elementwise.swiglu(x @ wg.T))
    job("down", lib, lambda: hidden @ wd.T)
    job("logits", lib, lambda: x @ head.T)
    for what, dy, a, w in (
        ("qkv", packed, x, wq), ("o", x, x, wo), ("gate_up", gates, x, wg), ("down", x, hidden, wd),
        ("logits", logits, x, head),
    ):
        job(f"d{what}, input", lib, lambda dy=dy, w=w: dy @ w)
        job(f"d{what}, weight", lib, lambda dy=dy, a=a: dy.T @ a)
    rope_tiles = [*map(tuple, tiles.TILES["rope"]), (64, 64, 64, 4, 4), (128, 64, 64, 8, 4), (64, 128, 128, 4, 3), (128, 128, 64, 8, 3), (64, 32, 128, 4, 4)]
    for t in rope_tiles:
        for p in (1, 2):
            if t[0] * t[1] * p * 132 > 2 * N * C * p or (p == 2 and N * C / (t[0] * t[1]) <= 132):
                continue
            s = lambda t=t, p=p: tile("rope", t, p)
            job("qkv", f"ours + rope {t} x{p}", lambda: matmul.qkv_rope(x, wq, rope, (H + K) * Dh), s)
    for t in rope_tiles:
        s = lambda t=t: tile("rope", t)
        job("o", f"ours {t}", lambda: matmul.qkv_rope(x, wo, plain, 0), s)
        job("down", f"ours {t}", lambda: matmul.qkv_rope(hidden, wd, plain, 0), s)
    more = [(128, 128, 64, 8, 2), (64, 256, 64, 8, 3), (64, 128, 64, 4, 3), (64, 128, 128, 4, 3), (128, 64, 64, 8, 4), (64, 64, 128, 4, 3)]
    for t in [*map(tuple, tiles.TILES["swiglu"]), *more]:
        for p in (1, 2):
            if p == 2 and N * 2 * F / (t[0] * t[1]) <= 132:
                continue
            s = lambda t=t, p=p: tile("swiglu", t, p)
            job("gate_up", f"ours + swiglu {t} x{p}", lambda: matmul.gate_up_swiglu(x, wg), s)
    for what, dy, w in (("qkv", packed, wq), ("gate_up", gates, wg)):
        job(f"d{what} + norm", lib + ", norm", lambda dy=dy, w=w: norm.add_norm_backward(dy @ w, x, state, bf))
        for t in [*map(tuple, tiles.TILES["norm"]), (64, 64, 64, 4, 4), (128, 64, 64, 8, 4), (64, 64, 64, 4, 6), (64, 32, 128, 4, 4)]:
            how = f"ours {t}" + (" ahead" if "prefetch" in only else "")
            s = lambda t=t: tile("norm", t)
            job(f"d{what} + norm", how, lambda dy=dy, w=w: mnb.product_norm_backward(dy, dots, w, x, state, dtype=bf), s)
    job("ddown + swiglu", lib + ", swiglu", lambda: elementwise.swiglu_backward(x @ wd, gates, x))
    for t in [*map(tuple, tiles.TILES["swiglu_backward"]), (128, 128, 64, 8, 2), (128, 64, 64, 8, 4), (64, 64, 64, 4, 4), (64, 128, 64, 8, 4), (64, 64, 128, 8, 3), (64, 64, 256, 4, 2)]:
        for p in (1, 2):
            if p == 2 and N * F / (t[0] * t[1]) <= 132:
                continue
            s = lambda t=t, p=p: tile("swiglu_backward", t, p)
            job("ddown + swiglu", f"ours {t} x{p}", lambda: msb.product_swiglu_backward(x, wd, gates, x), s)
    for r, w, pack in ((64, 4, 0), (64, 8, 0), (128, 8, 0), (32, 4, 0), (64, 4, 1), (32, 2, 1), (32, 4, 1), (64, 2, 1)):
        if pack and H == K:
            continue
        def s(r=r, w=w, pack=pack):
            short_attention.ROWS, short_attention.WARPS = r, w
            trials.ON = frozenset({"pack"} if pack else ())
        job("attention backward", f"rows {r} warps {w}{' a head, heads packed' if pack else ''}", lambda: short_attention.attend_backward(o, packed, (o, lse), rope, (H, K, K)), s)
    for e, per in ((2048, 32), (1024, 32), (1024, 16), (512, 16), (1024, 8), (512, 8), (2048, 16)):
        def s(e=e, per=per):
            os.environ["V4_NORM"] = f"{e},{per}"
            trials.ON = frozenset({"norm"})
        job("norm forward", f"elements {e}, {per} a thread", lambda: norm.add_norm(stream, x, weight, 1e-5, bf), s)
    if "prefetch" in only:
        jobs = [job for job in jobs if job[0].endswith("+ norm") and job[1].startswith("ours")]
    failed = []
    for what, how, work, setup in jobs:  # compiles
        try:
            setup()
            work()
        except Exception as error:
            failed.append((what, how))
            rows.append({"preset": preset, "what": what, "how": how, "error": repr(error)[-160:]})
    torch.cuda.synchronize()
    with Lock(True):
        for what, how, work, setup in jobs:
            if (what, how) in failed:
                continue
            try:
                setup()
                rows.append({"preset": preset, "what": what, "how": how, "us": captured_us(work)})
            except Exception as error:
                rows.append({"preset": preset, "what": what, "how": how, "error": repr(error)[-160:]})
    return rows


if MODE == "sweep":
    print(json.dumps(sweep(PRESETS[0])))
else:
    with Lock(MODE != "check"):
        print(json.dumps({preset: run(preset) for preset in PRESETS}))
WORKER
cat >.trial_drive.py <<'DRIVE'
"""Driver: checks, sweeps, traces, then timed processes in turns; writes $OUT/trials.json."""
import json, os, statistics, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OUT = Path(os.environ["OUT"])
LIMIT = float(os.environ.get("LIMIT", "230"))
START = time.time()
FULL = "halves,order,sort,next,prefetch,swiglu,pack,norm"
TRIALS = {
    "base": {},
    "halves": {"V4_TRIALS": "halves"},
    "order": {"V4_TRIALS": "order"},
    "late": {"V4_TRIALS": "late"},
    "sort": {"V4_TRIALS": "sort"},
    "next": {"V4_TRIALS": "next"},
    "norm": {"V4_TRIALS": "norm"},
    "prefetch": {"V4_TRIALS": "prefetch"},
    "swiglu": {"V4_TRIALS": "swiglu"},
    "pack": {"V4_TRIALS": "pack"},
    "schedule": {"V4_TRIALS": "halves,order,sort"},
    "all": {"V4_TRIALS": FULL},
    "all, late": {"V4_TRIALS": FULL.replace("order", "late")},
}
SAME_BITS = ("halves", "order", "late", "sort", "next", "schedule")
found = {"losses": {}, "ms": {}, "sweep": [], "failed": {}}


def worker(mode, presets, name, limit=150):
    environment = os.environ | TRIALS.get(name, {}) | {"V4_NAME": name.replace(", ", "_").replace(" ", "_")}
    if mode == "sweep" and name == "ahead":
        environment |= {"V4_TRIALS": "prefetch"}
    command = [sys.executable, ".trial_worker.py", mode, presets]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except Exception as error:
        text = getattr(locals().get("done"), "stderr", None) or repr(error)
        said = "\n".join(text.strip().splitlines()[-6:])
        print(f"FAILED {mode} {presets} {name}: {said}", flush=True)
        found["failed"][f"{mode} {presets} {name}"] = said
        return None


def save():
    (OUT / "trials.json").write_text(json.dumps(found, indent=1))


def left():
    return LIMIT - (time.time() - START)


with ThreadPoolExecutor(12) as pool:
    sweeps = [pool.submit(worker, "sweep", p, n) for p in ("small", "tiny") for n in ("", "ahead")]
    checks = {name: pool.submit(worker, "check", "tiny,small", name) for name in TRIALS}
    for name, check in checks.items():
        found["losses"][name] = check.result()
    found["sweep"] = [row for s in sweeps for row in s.result() or []]
save()
print(f"checked and swept after {time.time() - START:.0f} s")
base = found["losses"]["base"]
good = ["base"]
for name, found_losses in found["losses"].items():
    if not (base and found_losses):
        continue
    for preset in base:
        a, b = base[preset]["losses"], found_losses[preset]["losses"]
        error = max(abs(x - y) for x, y in zip(a, b))
        fine = error == 0 if name in SAME_BITS else error < 1e-3
        print(f"losses {name:14} {preset:6} largest difference {error:.2e} {'same bits' if error == 0 else ''} {'' if fine else 'NOT AS BEFORE'}")
    if name != "base":
        good.append(name)

for preset in ("tiny", "small"):
    for name in ("base", "all"):
        if name in good:
            worker("trace", preset, name)
print(f"traced after {time.time() - START:.0f} s")
for turn in range(3):
    def timed(name):
        if left() < 6:
            return
        presets = "tiny,small" + (",medium" if turn == 0 and name in ("base", "all", "norm") else "")
        result = worker("time", presets, name)
        for preset in result or {}:
            found["ms"].setdefault(preset, {}).setdefault(name, []).append(result[preset]["ms"]["median"])

    with ThreadPoolExecutor(3) as pool:  # one holds the GPU while the next ones import
        list(pool.map(timed, good))
    save()
    print(f"turn {turn + 1} ended after {time.time() - START:.0f} s", flush=True)

for preset, by_name in found["ms"].items():
    print(f"\n{preset}: ms, median of processes")
    reference = statistics.median(by_name["base"]) if "base" in by_name else float("nan")
    for name, times in by_name.items():
        middle = statistics.median(times)
        print(f"  {name:14} {middle:8.4f}  {100 * (middle / reference - 1):+6.2f}%  n {len(times)}  {min(times):.4f} to {max(times):.4f}")
groups = {}
for row in found["sweep"]:
    groups.setdefault((row["preset"], row["what"]), {})[row["how"]] = row
for (preset, what), by_how in sorted(groups.items()):
    rows = list(by_how.values())
    best = sorted((r for r in rows if "us" in r), key=lambda r: r["us"])
    library = [r for r in best if r["how"].startswith("cuBLAS")]
    shown = best[:4] + [r for r in library if r not in best[:4]]
    print(f"{preset:6} {what:20} " + "; ".join(f"{r['how']} {r['us']}" for r in shown))
for row in found["sweep"]:
    if "error" in row:
        print("sweep failed:", row["preset"], row["what"], row["how"], row["error"][-90:])
save()
DRIVE
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/v4_trials_triton}
python .trial_drive.py 2>&1 | tee "$OUT/trials.txt"
