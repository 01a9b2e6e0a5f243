#!/usr/bin/env bash
# Measures Version 2 beside Version 1 on this machine, each run a process of its own, in fp32 and bf16, and writes
# results/NAME/compare_PRESET_PRECISION_{v1,v2,v2_compiled}.json:
#
#     results/measure_v2.sh NAME PRESET:STEPS...
#     results/measure_v2.sh h100 tiny:100 small:100 medium:40
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 NAME PRESET:STEPS..." >&2
    exit 2
fi
results=$(cd "$(dirname "$0")" && pwd)
name=$1
shift
mkdir -p "$results/$name"
cd "$results/../version2_pytorch_fused"
for run in "$@"; do
    preset=${run%:*}
    for precision in fp32 bf16; do
        common=(--preset "$preset" --num-steps "${run#*:}")
        [ "$precision" = fp32 ] || common+=(--use-amp)
        out=../results/$name/compare_${preset}_$precision
        python ../version1_pytorch_baseline/tiny_llama_v1.py "${common[@]}" --metrics-out "${out}_v1.json"
        python tiny_llama_v2.py "${common[@]}" --metrics-out "${out}_v2.json"
        python tiny_llama_v2.py "${common[@]}" --enable-torch-compile --metrics-out "${out}_v2_compiled.json"
    done
done
