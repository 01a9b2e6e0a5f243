#!/usr/bin/env bash
# Trains the version in this folder at a preset (default: tiny), and summarizes what was measured.
#
#     bash launch_performance_study.sh [tiny|small|medium|large] [--enable-profilers] [-- ARGUMENTS OF THE SCRIPT]
#
#     --enable-profilers   then also PyTorch's profiler, DeepSpeed's FLOP counts, and the vendor's profilers that are installed
#
# The version's switches stand at their defaults. Without a GPU there is one run of 20 steps, in fp32. On a GPU a run has 100
# steps; a second one follows with --use-amp, and the profilers run with --use-amp too. All commands run in the folder of the
# results, so relative paths among the arguments of the script start there. The exit code is 0, or that of the first command
# that failed.
#
# Results, in ./performance_study/PRESET (after the first run, those of an earlier study are removed):
#
#     performance_study.md, .html   the summary
#     metrics_fp32.json             the record of the run; with --use-amp metrics_bf16.json
#     profiles/, flops_analysis/    with --enable-profilers: what run_all_profilers.sh of Version 2 and DeepSpeed's count write
#
# A version's folder that was copied with `common` alone trains too; a line names each script beside it that is not there.

set -euo pipefail
here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
. "$here/../common/profilers.sh"
for script in "$here"/tiny_llama_v*.py; do break; done # there is one
preset=
profilers=false
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) head_of_script; exit ;;
        tiny | small | medium | large) [ -z "$preset" ] || fail "give one preset, not $preset and $1"; preset=$1 ;;
        --enable-profilers) profilers=true ;;
        --) arguments=("${@:2}"); break ;;
        *) fail "'$1' is no argument of $(basename "$0"): give tiny, small, medium or large, and --enable-profilers" ;;
    esac
    shift
done
preset=${preset:-tiny}

folder=performance_study/$preset
mkdir -p "$folder" || exit 2
cd "$folder"
: >.begun || exit 2
trap 'rm -f .begun' EXIT

run() { # METRICS FILE, FLAGS: a training run; a failure is noted, but wrong input and a signal end the study
    local failed=0
    python "$script" --preset "$preset" --num-steps "$steps" --metrics-out "$@" ${arguments[@]+"${arguments[@]}"} || failed=$?
    [ "$failed" -le 1 ] || exit "$failed"
    keep_first "$failed"
}

beside() { # SCRIPT: false, with a line, if this script of another version is not there
    [ -f "$here/../$1" ] || ! echo "left out: there is no $here/../$1" >&2
}

steps=20
precision=()
gpu=false
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    gpu=true
    steps=100
fi
run metrics_fp32.json
for each in metrics_fp32.json metrics_bf16.json profiles flops_analysis; do
    [ "$each" -nt .begun ] || rm -rf "$each" # only now: wrong input or a kill before this line loses no earlier study
done
if [ "$gpu" = true ]; then
    precision=(--use-amp)
    run metrics_bf16.json --use-amp
fi
if [ "$profilers" = true ]; then
    ! beside version2_pytorch_fused/run_all_profilers.sh ||
        bash "$here/../version2_pytorch_fused/run_all_profilers.sh" --enable-rocm-tools --profile-dir profiles --script "$script" \
            -- --preset "$preset" ${precision[@]+"${precision[@]}"} ${arguments[@]+"${arguments[@]}"} || keep_first $?
    mkdir -p flops_analysis
    run flops_analysis/metrics.json --enable-deepspeed-flops --measure-peak ${precision[@]+"${precision[@]}"}
fi
! beside version1_pytorch_baseline/analyze_performance_study.py ||
    python "$here/../version1_pytorch_baseline/analyze_performance_study.py" --folder . || keep_first $?
exit "$code"
