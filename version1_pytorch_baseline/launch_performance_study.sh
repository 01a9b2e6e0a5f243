#!/usr/bin/env bash
# Trains this version at a preset and shows what was measured: bash launch_performance_study.sh tiny; --help says more.
#
#     bash launch_performance_study.sh [tiny|small|medium|large] [--enable-profilers] [-- ARGUMENTS OF THE SCRIPT]
#
#     --enable-profilers   then also PyTorch's profiler, DeepSpeed's FLOP counts, and the vendor's profilers that are installed
#
# Without a GPU there is one run of 20 steps, in fp32. On a GPU a run has 100 steps, and a second one follows with --use-amp.
# Results, in ./performance_study/PRESET: metrics_fp32.json and metrics_bf16.json, the records; performance_study.txt, their table;
# profiles/, of the profilers. The script of this name in each version's folder sources this one. It ends at the first failure.
set -euo pipefail
fail() {
    echo "error: $1" >&2
    exit 2
}
version=$(dirname "$0")
root=$version/..
preset=tiny
profilers=false
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        tiny | small | medium | large) preset=$1 ;;
        --enable-profilers) profilers=true ;;
        --) shift; break ;;
        *) fail "'$1' is no argument of launch_performance_study.sh: give tiny, small, medium or large, and --enable-profilers" ;;
    esac
    shift
done
folder=performance_study/$preset
mkdir -p "$folder" || exit 2
steps=20
amp=
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    steps=100
    amp=--use-amp
fi
train() { # NAME OF THE RECORD, ARGUMENTS
    python "$version"/tiny_llama_v*.py --preset "$preset" --num-steps "$steps" --metrics-out "$folder/$1" "${@:2}"
}
train metrics_fp32.json "$@"
[ -z "$amp" ] || train metrics_bf16.json $amp "$@"
python "$root/version1_pytorch_baseline/show_runs.py" "$folder"/metrics_*.json | tee "$folder/performance_study.txt"
[ "$profilers" = false ] || bash "$root/version2_pytorch_fused/run_all_profilers.sh" --enable-rocm-tools \
    --script "$version"/tiny_llama_v*.py --profile-dir "$folder/profiles" -- --preset "$preset" $amp "$@"
