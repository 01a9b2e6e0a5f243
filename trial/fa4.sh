#!/usr/bin/env bash
# Trials on one H200:  .trial_gpu.sh PART...  of fa4, fsdp, processes, energy, attention. JSON goes to $OUT.
# fa4 and attention need flash-attn-4: both halves of /tmp/fa4parts, a carried as .fa4a by an earlier call
# (of any part: it keeps that half in /tmp/fa4kept), b as .fa4b. What .whl has is installed if pydantic is missing.
set -uo pipefail
cd "$(dirname "$0")"
OUT=${OUT:-/tmp/out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
suite=version2_pytorch_fused/benchmark_suite.py
SECONDS=0
if ! python3 -c 'import pydantic' 2>/dev/null && [ -d .whl ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    export PYTHONPATH=/tmp/site${PYTHONPATH:+:$PYTHONPATH}
fi
for half in .fa4a .fa4b; do
    [ ! -e $half/install.sh ] || . $half/install.sh
done

said() { echo; echo "== $* (at $SECONDS s)"; }

study() { # TARGET ARGUMENTS...: a benchmark_suite, whose record becomes $OUT/TARGET
    local work target=$1
    work=$(mktemp -d)
    python3 $suite --use-amp --batch-sizes preset --seq-lengths preset --output-dir "$work" "${@:2}" 2>&1 | grep -E '^ *[0-9]+ of|rror|leaves' 
    cp "$work/benchmark.json" "$OUT/$target" && python3 - "$OUT/$target" <<'P'
import json, sys
from statistics import median
record = json.load(open(sys.argv[1]))
print(record["status"], record["device"]["name"], record.get("packages"))
for cell in record["cells"]:
    runs = cell["runs"]
    ms = [run["step_ms"]["median"] for run in runs]
    line = f'{cell["model"]:22} {cell["status"]:6} {cell["reason"] or ""}'
    if ms:
        line += f' median {median(ms):.4f} ms  processes ' + " ".join(f"{x:.4f}" for x in ms)
        for name in ("joules", "watts", "clock_mhz", "reserved_mib"):
            if runs[0].get(name) is not None:
                line += f'  {name} {median(run[name] for run in runs):.5g}'
        if "joules" in runs[0]:
            watts = [run["joules"] / run["step_ms"]["median"] * 1e3 for run in runs]
            line += "  W=J/median " + " ".join(f"{w:.0f}" for w in watts)
    print(line)
P
}

fa4() {
    said "FlashAttention-4: tests with the package"
    python3 -c 'import importlib.metadata as m, flash_attn.cute; print("flash-attn-4", m.version("flash-attn-4"), "cutlass-dsl", m.version("nvidia-cutlass-dsl"), "quack", m.version("quack-kernels"))'
    python3 -m pytest tests/version4_ultra_fused/kernels/test_attention.py -q -k "flash_attention_4" -p no:cacheprovider --durations 4 2>&1 | tail -40
    said "Version 4 at large, bf16, with and without it: 3 processes each, in turns"
    study fa4_large_bf16.json --preset large --models "${FA4_MODELS:-v4,v4-fa4}" --metrics throughput,memory \
        --num-steps 20 --load-seconds 5 --timed-seconds 5 --repeats 3
}

fsdp() {
    local work case number=0
    work=$(mktemp -d)
    said "fully_shard, captured: one process, one GPU"
    while read -r case; do
        number=$((number + 1))
        # shellcheck disable=SC2086
        timeout 90 torchrun --standalone --nproc-per-node 1 .trial_fsdp.py $case --out "$work/case_$number.json" </dev/null 2>"$work/err" \
            | grep -v '^$' || { echo "no result: $case"; grep -v Warning "$work/err" | tail -4; }
    done <<'CASES'
--preset small --reshard no
--preset small --reshard yes
--preset small --reshard house
--preset small --reshard no --collectives
--preset small --reshard yes --collectives
--preset small --reshard house --collectives
--preset small --reshard house --collectives --warm default
--preset small --reshard house --collectives --mode global
--preset medium --reshard no --collectives --iterations 40
--preset medium --reshard house --collectives --iterations 40
--preset medium --reshard house --iterations 40
CASES
    said "two processes on one GPU, if NCCL lets them"
    NCCL_MULTI_RANK_GPU_ENABLE=1 timeout 60 torchrun --standalone --nproc-per-node 2 .trial_fsdp.py --preset small \
        --reshard house --one-gpu --iterations 10 --out "$work/two.json" 2>&1 | grep -iE 'capture|duplicate|error' | head -3
    said "Version 2's own run, with the refusal taken out: --parallel fsdp, with collectives"
    local mode
    for mode in --no-capture-step --capture-step; do
        FSDP_COLLECTIVES=1 timeout 90 torchrun --standalone --nproc-per-node 1 .trial_fsdp.py --house --preset small --use-amp \
            --num-steps 40 --parallel fsdp $mode --metrics-out "$work/house$mode.json" 2>&1 | grep -E '^error|RunError|ms|Error' | tail -3
    done
    python3 - "$work" "$OUT/fsdp.json" <<'P'
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
found = {"cases": [json.loads(path.read_text()) for path in sorted(work.glob("case_*.json"), key=lambda p: int(p.stem[5:]))]}
if (work / "two.json").exists():
    found["two_processes"] = json.loads((work / "two.json").read_text())
runs = {}
for path in work.glob("house*.json"):
    record = json.loads(path.read_text())
    runs[path.stem] = {"status": record["status"], "ms": record["step_ms"]["median"], "loss": record["loss"]["all"], "memory": record["memory"]}
found["house"] = runs
losses = [run["loss"] for run in runs.values()]
if len(losses) == 2:
    found["house_largest_difference_of_loss"] = max(abs(a - b) for a, b in zip(*losses))
    print({name: (run["status"], round(run["ms"], 3)) for name, run in runs.items()}, "losses differ by", found["house_largest_difference_of_loss"])
pathlib.Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
P
}

processes() {
    said "Version 4 with and without its early update at tiny: six processes each, in turns"
    study processes_tiny_bf16.json --preset tiny --models v4,v4-no-early-update --metrics throughput,memory --num-steps 300 --repeats 6
    (cd version1_pytorch_baseline/exercises/measuring_that_holds \
        && KERNEL_EXERCISES=solution python3 measure.py --processes "$OUT/processes_tiny_bf16.json")
}

energy() {
    local model
    said "energy over 20 s, by the benchmark"
    study energy_medium_bf16.json --preset medium --models "${ENERGY_MODELS:-v1,v3-captured,v4}" --metrics throughput,energy \
        --repeats 1 --load-seconds 10 --timed-seconds 20
    said "power by the counter's updates, by five first steps, and by NVML"
    for model in ${POWER_MODELS:-v1 v4}; do
        python3 .trial_energy.py "$model" --out "$OUT/power_$model.json"
    done
}

attention() {
    said "one attention, forward and backward"
    python3 .trial_attention.py --out "$OUT/attention_fa4.json"
}

[ $# -gt 0 ] || { echo "usage: $0 fa4|fsdp|processes|energy|attention ..." >&2; exit 2; }
for part in "$@"; do
    declare -F "$part" >/dev/null || { echo "no part '$part'" >&2; exit 2; }
    "$part"
done
said "end"
