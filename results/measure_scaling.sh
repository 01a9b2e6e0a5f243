#!/usr/bin/env bash
# Measures weak and strong scaling over the GPUs of this machine. Writes results/NAME/scaling_PRESET_PRECISION.json
#
#     results/measure_scaling.sh NAME PRESET:STEPS...
#     NCCL_NVLS_ENABLE=0 results/measure_scaling.sh h200 small:100 medium:40 large:20
#
# Variables: MODELS (default: v1,v4), PARALLEL (ddp,zero1,fsdp), PROCESSES (1, 2, 4, ... up to the GPUs here), PRECISIONS (bf16),
# REPEATS (3).
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 NAME PRESET:STEPS..." >&2
    exit 2
fi
results=$(CDPATH='' cd "$(dirname "$0")" && pwd)
out=$results/$1
shift
mkdir -p "$out"
cd "$results/../version4_ultra_fused"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$results/keep.sh"

for run in "$@"; do
    preset=${run%:*}
    for precision in ${PRECISIONS:-bf16}; do
        flags=(--preset "$preset" --num-steps "${run#*:}" --repeats "${REPEATS:-3}" --models "${MODELS:-v1,v4}")
        if [ "$precision" = bf16 ]; then flags+=(--use-amp); fi
        if [ -n "${PROCESSES:-}" ]; then flags+=(--processes "$PROCESSES"); fi
        keep scaling.json "$out/scaling_${preset}_$precision.json" \
            python scaling_study.py "${flags[@]}" --parallel "${PARALLEL:-ddp,zero1,fsdp}" --output-dir "$work"
    done
done
exit "$code"
