#!/usr/bin/env bash
# Measures Version 1 on this machine for the documents, and writes results/NAME/v1_PRESET.json and v1_PRESET_profile.json.gz:
#
#     results/measure_v1.sh NAME PRESET:STEPS...
#     results/measure_v1.sh h100 tiny:300 small:200 medium:100
#     results/measure_v1.sh cpu tiny:300 small:20
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 NAME PRESET:STEPS..." >&2
    exit 2
fi
results=$(CDPATH='' cd "$(dirname "$0")" && pwd)
out=$results/$1
shift
mkdir -p "$out"
cd "$results/../version1_pytorch_baseline"
for run in "$@"; do
    preset=${run%:*}
    steps=${run#*:}
    python tiny_llama_v1.py --preset "$preset" --num-steps "$steps" --measure-peak --time-phases \
        --metrics-out "../results/$(basename "$out")/v1_$preset.json"
    profiles=$(mktemp -d)
    python tiny_llama_v1.py --preset "$preset" --num-steps 30 --enable-pytorch-profiler \
        --profile-dir "$profiles" --metrics-out "$profiles/run.json"
    gzip --no-name --best --stdout "$profiles"/profile_*.json >"$out/v1_${preset}_profile.json.gz"
    rm -r "$profiles"
done
