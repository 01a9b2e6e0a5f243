"""Trials in FP8 on a GPU: `correct`, `kernels SIZE`, `times SIZE NUMBER`, `table`, `curves`; JSON goes to $OUT."""

import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

from common import weights
from common.config import resolve
from common.device import stream_before_capture
from common.precision import Precision
from common.rope import rope_tables
from common.training.capture import CapturedStep
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.kernels import KERNELS as K
from version4_ultra_fused.kernels.fp8 import casts, trial
from version4_ultra_fused.kernels.reference import Rope, Slot, Stored
from version4_ultra_fused.memory.optimizer import MasterAdamW

OUT = Path(os.environ.get("OUT", "."))
CUDA = torch.device("cuda")
BF16 = Precision(CUDA, torch.bfloat16)
NAMES = ("HEAD", "WEIGHTS", "NORM", "ROTATE", "TOKENS", "WARPS")
NORM = json.loads((OUT / "norm.json").read_text()) if (OUT / "norm.json").exists() else {}


def variants(size):
    norm = NORM.get(size, {"NORM": 1})
    found = {
        "as is": {},
        "head1": {"HEAD": 1},
        "head2": {"HEAD": 2},
        "norm": norm,
        "rotate": {"ROTATE": 1},
        "weights": {"WEIGHTS": 1},
        "all but head": {"ROTATE": 1, "WEIGHTS": 1, **norm},
        "all": {"HEAD": 2, "ROTATE": 1, "WEIGHTS": 1, **norm},
    }
    if size == "medium":
        return {k: v for k, v in found.items() if "HEAD" not in v}
    return {k: v for k, v in found.items() if k not in ("all but head", "head1")}


def set_trials(values):
    for name in NAMES:
        os.environ.pop(f"TRIAL_{name}", None)
    os.environ.update({f"TRIAL_{name}": str(value) for name, value in values.items()})


def attempt(name, function, *arguments):
    try:
        return function(*arguments)
    except Exception:
        print(f"{name} FAILED:\n" + "".join(traceback.format_exc().splitlines(True)[-4:]), flush=True)
        return None


def write(name, value):
    (OUT / f"{name}.json").write_text(json.dumps(value, indent=1))


def made(config, fp8=True, lr=3e-4):
    torch.manual_seed(0)
    with weights.drawn_on(CUDA), CUDA:
        model = v4.TinyLlama(config, v4.SWITCHES | {"fp8": fp8}).to(CUDA)
    optimizer = MasterAdamW(model, lr=lr, fp8=fp8)
    return model, optimizer, v4.make_step(model, optimizer, BF16)


def batches(config, shape, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(config.vocab_size, (shape[0], shape[1] + 1), generator=generator)
        # a source that can be learned: half of the tokens are the one before plus one
        ids[:, 1::2] = (ids[:, :-1:2] + 1)[:, : ids[:, 1::2].shape[1]] % config.vocab_size
        ids = ids.cuda()
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gradients(config, batch, fp8):
    model, optimizer, step = made(config, fp8, lr=0.0)
    for _ in range(2):
        step(batch)
    return {n: model.plan.buffers.gradient[p].float().cpu() for n, p in model.named_parameters()}


def error(ours, right, names=None):
    names = names or list(right)
    up = sum((ours[n] - right[n]).square().sum().double() for n in names)
    return (up / sum(right[n].square().sum().double() for n in names)).sqrt().item()


def correct_one(config, data, bf16):
    ours = gradients(config, data[0], True)
    head = [n for n in bf16 if "embed" in n or "lm_head" in n]
    worst = max(bf16, key=lambda n: error(ours, bf16, [n]))
    eager_step = made(config)[2]
    with stream_before_capture():
        eager = [eager_step(batch).item() for batch in data]
    model, optimizer, step = made(config)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with stream_before_capture():
        for _ in range(3):
            step(data[0])
    captured = CapturedStep(step, data[0])
    for held in optimizer.state.values():
        for value in held.values():
            value.zero_()
    optimizer.scales.seen.zero_()
    optimizer.scales.begin(1)
    model.load_state_dict(state)  # stores weights in FP8 as well
    losses = [captured(batch).item() for batch in data]
    return {
        "losses": losses,
        "eager": eager,
        "all": error(ours, bf16),
        "embedding": error(ours, bf16, head),
        "worst": [worst, error(ours, bf16, [worst])],
    }


def correct():
    model = resolve("medium").model.model_copy(update={"vocab_size": 32000, "num_layers": 4})
    data = list(batches(model, (16, 512), 5))
    set_trials({})
    bf16 = gradients(model, data[0], False)
    rows = {}
    for name, values in {**variants("large"), "head1": {"HEAD": 1}, "norm2": {"NORM": 2}}.items():
        set_trials(values)
        row = attempt(name, correct_one, model, data, bf16)
        if row:
            rows[name] = row
            losses, eager = ([round(x, 4) for x in row[k]] for k in ("losses", "eager"))
            print(f"{name:9} captured {losses} eager {eager}")
            print(
                f"{'':9} error to bf16's gradient: all {row['all']:.4f}, embedding "
                f"{row['embedding']:.4f}, worst {row['worst'][1]:.4f} {row['worst'][0]}",
                flush=True,
            )
        torch.cuda.empty_cache()
    write("correct", rows)


def us(functions, rounds=5):
    """Microseconds of one call: functions that differ in their buffers, in one graph."""
    kept = [function() for function in functions]  # so that each has memory of its own
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(max(1, 12 // len(functions))):
            kept = [function() for function in functions]
    count = max(1, 12 // len(functions)) * len(functions)
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return statistics.median(times[2:])


def slot(dtype):
    return Slot(torch.full((), 0.05, device=CUDA), torch.zeros((), device=CUDA), dtype)


def kernels(size):
    config = resolve(size)
    m = config.model
    tokens = config.training.batch_size * config.training.sequence_length
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    D, F, V, Dh = m.hidden_size, m.intermediate_size, m.vocab_size, m.head_dim
    H, KV = m.num_attention_heads, m.num_key_value_heads
    rows = {}

    def add(name, functions, moved):
        value = attempt(name, us, functions)
        if value:
            rows[name] = {"us": value, "tb_s": moved / value / 1e6}
            print(f"{name:36} {value:8.1f} us {rows[name]['tb_s']:6.2f} TB/s", flush=True)
        return value or float("inf")

    x = [torch.randn(tokens, D, device=CUDA) for _ in range(2)]
    y = [torch.randn(tokens, D, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    w = torch.ones(D, device=CUDA)
    s, g = slot(e4m3), slot(e5m2)
    n = tokens * D

    def old(i):
        return lambda: K.quantize(K.add_norm(x[i], y[i], w, 1e-5, torch.bfloat16)[1], s)

    def new(i):
        return lambda: K.add_norm_quantized(x[i], y[i], w, 1e-5, s, torch.bfloat16)

    print(f"-- {size}")
    add("norm, bf16", [lambda i=i: K.add_norm(x[i], y[i], w, 1e-5, torch.bfloat16) for i in (0, 1)], 14 * n)
    add("norm and quantize", [old(0), old(1)], 18 * n)
    best = (float("inf"), {})
    for values in (
        {"NORM": 2},
        *({"NORM": 1, "TOKENS": t, "WARPS": p} for t, p in ((16, 8), (16, 16), (16, 32), (8, 16), (8, 8), (32, 32))),
    ):
        set_trials(values)
        best = min(best, (add(f"norm {values}", [new(0), new(1)], 14 * n), values), key=lambda b: b[0])
    NORM[size] = best[1]
    write("norm", NORM)
    set_trials({})
    for t, c, p in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8), (32, 256, 8), (32, 64, 2), (128, 128, 16)):
        def cast(i, t=t, c=c, p=p):
            r, q = casts._empty(tokens, D, s)
            casts._quantize[-(-tokens // t), -(-D // c)](
                y[i], r, q, s.scale, s.largest, tokens, D, D, MAX=448.0, TOKENS=t, COLUMNS=c, num_warps=p
            )
        add(f"quantize, tile {t} x {c}, {p} warps", [lambda i=i: cast(i) for i in range(4)], 4 * n)
    B, S = config.training.batch_size, config.training.sequence_length
    q = [torch.randn(B, S, H, Dh, device=CUDA, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    kv = [torch.randn(2, B, S, KV, Dh, device=CUDA, dtype=torch.bfloat16).transpose(2, 3) for _ in range(2)]
    rope = Rope(*(t.cuda() for t in rope_tables(Dh, S, 1e4)), S)
    c = tokens * (H + 2 * KV) * Dh
    add("rotate back and quantize", [lambda i=i: K.quantize(K.rotate_back(q[i], *kv[i], rope), g) for i in (0, 1)], 8 * c)
    add("rotate back quantized", [lambda i=i: K.rotate_back_quantized(q[i], *kv[i], rope, g) for i in (0, 1)], 4 * c)
    matrix = torch.randn(2 * F, D, device=CUDA, dtype=torch.bfloat16)
    add("quantize gate and up's weight", [lambda: K.quantize(matrix, s)], 4 * matrix.numel())
    master, *moments = (torch.rand(2 * F, D, device=CUDA) for _ in range(3))
    stored = Stored(*K.quantize(matrix, s), torch.ones((), device=CUDA))
    rule = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    gradient, copy, one = torch.randn_like(matrix), torch.empty_like(matrix), torch.ones((), device=CUDA)

    def update():
        K.adamw(master.view(-1), tuple(moments), gradient.view(-1), copy.view(-1), one, **rule)

    def update_and_quantize():
        update()
        return K.quantize(copy, s)

    p = matrix.numel()
    add("AdamW of gate and up", [update], 28 * p)
    add("AdamW and quantize", [update_and_quantize], 32 * p)
    add("AdamW quantized", [lambda: K.adamw_quantized(master, tuple(moments), gradient, s, stored, one, **rule)], 28 * p)
    del master, moments, gradient, copy
    if size == "large":
        del x, q, kv
        logits = torch.randn(tokens, V, device=CUDA, dtype=torch.bfloat16)
        targets = torch.randint(V, (tokens,), device=CUDA)
        h = torch.randn(V, D, device=CUDA, dtype=torch.bfloat16)
        out = torch.empty(V, D, device=CUDA)
        z = tokens * V
        add("cross entropy", [lambda: K.cross_entropy(logits, targets, True)], 4 * z)
        add("quantize dlogits", [lambda: K.quantize(logits, g)], 4 * z)
        logits.normal_()
        add("cross entropy quantized", [lambda: K.cross_entropy_quantized(logits, targets, e5m2)], 6 * z)
        add("quantize head's weight", [lambda: K.quantize(h, s)], 4 * h.numel())
        fl = 2e-6 * z * D
        yr, yc = K.quantize(y[0], s)
        hr, hc = K.quantize(h, s)
        dr, dc = K.quantize(logits, g)
        mm = torch._scaled_mm
        products = {
            "head bf16 forward": lambda: y[0] @ h.T,
            "head bf16 dy": lambda: logits @ h,
            "head bf16 dW": lambda: torch.mm(logits.T, y[0], out_dtype=torch.float32, out=out),
            "head fp8 forward": lambda: mm(yr, hr.T, scale_a=s.scale, scale_b=s.scale, out_dtype=torch.bfloat16, use_fast_accum=True),
            "head fp8 dy": lambda: mm(dr, hc.T, scale_a=g.scale, scale_b=s.scale, out_dtype=torch.bfloat16),
            "head fp8 dy fast": lambda: mm(dr, hc.T, scale_a=g.scale, scale_b=s.scale, out_dtype=torch.bfloat16, use_fast_accum=True),
            "head fp8 dW": lambda: mm(dc, yc.T, scale_a=g.scale, scale_b=s.scale, out_dtype=torch.float32, out=out),
            "head fp8 dW fast": lambda: mm(dc, yc.T, scale_a=g.scale, scale_b=s.scale, out_dtype=torch.float32, out=out, use_fast_accum=True),
        }
        for name, function in products.items():
            value = attempt(name, us, [function])
            if value:
                rows[name] = {"us": value, "tflop_s": fl / value}
                print(f"{name:36} {value:8.1f} us {fl / value:6.0f} TFLOP/s", flush=True)
    write(f"kernels_{size}", rows)


def times(size, number):
    config = resolve(size)
    shape = (config.training.batch_size, config.training.sequence_length)
    (batch,) = batches(config.model, shape, 1)
    set_trials({"HEAD": 1, "WEIGHTS": 1})  # so that there is a scale for the head
    model, optimizer, step = made(config.model, lr=1e-5)
    steps, held = {}, {}
    for name, values in variants(size).items():
        set_trials(values)

        def make(name=name):
            with stream_before_capture():
                for _ in range(3):
                    step(batch)
            captured = CapturedStep(step, batch)
            loss = captured(batch).item()
            assert loss == loss, "the loss is not a number"
            held[name] = captured.peak_bytes / 2**30
            steps[name] = captured

        attempt(name, make)
    found = {name: [] for name in steps}
    turns = 10 if size == "medium" else 4
    end = time.perf_counter() + 3
    while time.perf_counter() < end:
        for captured in steps.values():
            captured(batch)
        torch.cuda.synchronize()
    names = list(steps)
    for turn in range(turns):
        for place in range(len(names)):
            name = names[(place + turn + number) % len(names)]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
            steps[name](batch)
            for event in events[:-1]:
                event.record()
                steps[name](batch)
            events[-1].record()
            torch.cuda.synchronize()
            found[name] += [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    write(f"times_{size}_{number}", {"ms": found, "peak_gib": held})
    print(size, number, {name: round(statistics.median(values), 3) for name, values in found.items()}, flush=True)


def table():
    for size in ("medium", "large"):
        files = [json.loads(p.read_text()) for p in sorted(OUT.glob(f"times_{size}_*.json"))]
        if not files:
            continue
        print(f"| {size}, ms | median of {len(files)} processes | all | gain in its process | tensors, GiB |")
        for name in files[0]["ms"]:
            ms = [statistics.median(f["ms"][name]) for f in files if name in f["ms"]]
            gain = [100 * (1 - statistics.median(f["ms"][name]) / statistics.median(f["ms"]["as is"])) for f in files if name in f["ms"]]
            print(f"| {name} | {statistics.median(ms):.3f} | {', '.join(f'{x:.3f}' for x in ms)} | {', '.join(f'{x:+.2f}%' for x in gain)} | {files[0]['peak_gib'][name]:.2f} |")


def curves():
    for path in sorted(OUT.glob("curve_*.json")):
        run = json.loads(path.read_text())
        losses = run["loss"]["all"]
        picked = {i: round(losses[i - 1], 3) for i in (1, 10, 50, 100, 150) if i <= len(losses)}
        mean = round(statistics.mean(losses[100:]), 4)
        print(path.stem, "loss by step:", picked, "mean from 101:", mean, "fp8:", run.get("fp8"))


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    {"correct": correct, "kernels": kernels, "times": lambda s, n: times(s, int(n)), "table": table, "curves": curves}[command](*rest)
