#!/usr/bin/env bash
# OUT=folder .trial_gpu.sh [kernel] [steps] [curves] [tests]     without names: kernel steps curves
set -euo pipefail
: "${OUT:?}"
parts=${*:-kernel steps curves}
v2=version2_pytorch_fused v4=version4_ultra_fused
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kernel() { # one launch of AdamW alone: us and GB/s, at the numbers of weights of small, medium and large
    cat >"$work/kernel.py" <<'PY'
import importlib.util, json, os, statistics, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
import torch

source = Path("version4_ultra_fused/kernels/adamw.py").read_text()
FP32, BF16 = torch.float32, torch.bfloat16
seven = ("tl.arange(0, SIZE // 4))", "tl.arange(0, SIZE // 4), 7)")
nearest = [("m = _rounded(m, random & 0xFFFF)", "m = m"), ("v = _rounded(v, random >> 16)", "v = v")]
VARIANTS = {
    "fp32": (FP32, []),
    "bf16": (BF16, []),
    "bf16, 7 rounds": (BF16, [seven]),
    "bf16, to the nearest, no random bits": (BF16, nearest),
    "bf16, BLOCK 2048, 8 warps": (BF16, [("BLOCK = 1024", "BLOCK = 2048"), ("num_warps=4", "num_warps=8")]),
    "bf16, BLOCK 512": (BF16, [("BLOCK = 1024", "BLOCK = 512")]),
    "fp32, BLOCK 2048, 8 warps": (FP32, [("BLOCK = 1024", "BLOCK = 2048"), ("num_warps=4", "num_warps=8")]),
}
rows = []
for preset, size in (("small", 32_000_000), ("medium", 190_000_000), ("large", 1_030_000_000)):
    for name, (dtype, changes) in VARIANTS.items():
        text = source
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path = Path(sys.argv[1]) / f"adamw_{len(rows)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        w = torch.randn(size, device="cuda")
        g, copy = torch.randn(size, device="cuda", dtype=BF16), torch.empty(size, device="cuda", dtype=BF16)
        m, v = torch.zeros(2, size, device="cuda", dtype=dtype)
        t = torch.ones((), device="cuda")
        update = lambda: module.adamw(w, (m, v), g, copy, t, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        times = []
        for _ in range(30):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # the launch is there before it may begin
            begin.record(); update(); end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        us = statistics.median(times[10:])
        gb = size * (28 if dtype == FP32 else 20) / us / 1e3
        rows.append({"preset": preset, "variant": name, "us": us, "gb_per_second": gb})
        print(f"{preset:8}{name:40}{us:10.1f} us{gb:8.0f} GB/s", flush=True)
        del w, g, copy, m, v
json.dump(rows, open(sys.argv[2], "w"), indent=0)
PY
    python "$work/kernel.py" "$work" "$OUT/adamw_kernel.json"
}

steps() { # v4 beside v4-bf16-moments in turns, three processes of each
    for preset in ${PRESETS:-small medium large}; do
        duration=(--num-steps 100)
        [ "$preset" = small ] || duration=(--num-steps 20 --load-seconds 5 --timed-seconds 5)
        python $v2/benchmark_suite.py --preset "$preset" --use-amp --batch-sizes preset --seq-lengths preset \
            --metrics throughput,memory --models v4,v4-bf16-moments --repeats 3 "${duration[@]}" --output-dir "$work/$preset"
        cp "$work/$preset/benchmark.json" "$OUT/moments_${preset}_bf16.json"
    done
}

curves() { # 300 steps on real text, with and without the switch
    for seed in 0 1 2; do
        train=(python $v4/tiny_llama_v4.py --preset small --use-amp --num-steps 300 --seed $seed --learning-rate 1e-3)
        "${train[@]}" --metrics-out "$OUT/moments_curve_${seed}_fp32.json"
        "${train[@]}" --enable-bf16-moments --metrics-out "$OUT/moments_curve_${seed}_bf16.json"
    done
    python - "$OUT" <<'PY'
import json, sys
for seed in range(3):
    means = []
    for kind in ("fp32", "bf16"):
        losses = json.load(open(f"{sys.argv[1]}/moments_curve_{seed}_{kind}.json"))["loss"]["all"]
        means.append(sum(losses[-50:]) / 50)
    print(f"seed {seed}: last 50 steps {means[0]:.4f} with fp32 moments, {means[1]:.4f} with bf16, {means[1] - means[0]:+.4f}")
PY
}

tests() { # those that need a GPU
    python -m pytest -q -x tests/version4_ultra_fused/test_kernels.py -k "adamw or moments or philox"
    python -m pytest -q -x tests/common/training/test_capture.py -k "trains_as and v4"
    python -m pytest -q -x tests/version4_ultra_fused/test_kernel_versions.py -k "trains_as and moments"
    train=(python $v4/tiny_llama_v4.py --preset tiny --use-amp --enable-bf16-moments --deterministic --data synthetic)
    "${train[@]}" --num-steps 40 --metrics-out "$work/whole.json"
    "${train[@]}" --num-steps 20 --metrics-out "$work/first.json" --checkpoint-dir "$work/saved"
    "${train[@]}" --num-steps 40 --metrics-out "$work/rest.json" --checkpoint-dir "$work/saved" --resume
    python - "$work" <<'PY'
import json, sys
whole, first, rest = (json.load(open(f"{sys.argv[1]}/{name}.json"))["loss"]["all"] for name in ("whole", "first", "rest"))
assert first + rest == whole, (first[-1], rest[:2], whole[19:22])
print("resumed: the losses repeat bit for bit")
PY
}

for part in $parts; do "$part"; done
