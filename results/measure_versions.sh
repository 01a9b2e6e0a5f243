#!/usr/bin/env bash
# Measures the versions, their kernels and their peers on this machine, for the documents. Some parts need a GPU.
#
#     results/measure_versions.sh NAME PARTS PRESET:STEPS...
#     results/measure_versions.sh h100 ablation,versions,kernels tiny:100 small:100 medium:40
#
# PARTS, and the files that they write into results/NAME:
#
#     v1          v1_PRESET.json, v1_PRESET_profile.json.gz    Version 1, fp32, with its phases
#     ablation    v2_ablation_PRESET_PRECISION.json    all combinations of fusions, interleaved
#     versions    versions_PRESET_PRECISION.json       all versions and external baselines, also captured (GPU)
#     determinism determinism_PRESET_PRECISION.json    versions with and without deterministic algorithms (GPU)
#     peer_traces traces/peer_NAME_PRESET.json.gz      two steps of each external baseline, bf16 (GPU)
#     formats     formats_PRESET_bf16.json             Version 4, its products in bf16 and in FP8 (GPU)
#     sequence    sequence_memory.json                 peak memory over the sequence length, fp32, tiny
#     kernels     kernels_*.json                       Version 3's kernels and their peers, bf16 (GPU)
#
# PRECISIONS="bf16" in the environment leaves fp32 out. At medium and large a step is timed for 10 s after 10 s of load.
# A study that is stopped leaves FILE.interrupted, and ends the script. The exit code is 1 if a model failed.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 NAME PARTS PRESET:STEPS..." >&2
    exit 2
fi
results=$(CDPATH='' cd "$(dirname "$0")" && pwd)
out=$results/$1
parts=${2//,/ }
shift 2
mkdir -p "$out"
cd "$results/.."
v1=version1_pytorch_baseline v2=version2_pytorch_fused v3=version3_triton
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
code=0

keep() { # FILE TARGET COMMAND...: runs a study that writes FILE into its --output-dir, and keeps that as TARGET
    local ended=0
    "${@:3}" --output-dir "$work" || ended=$?
    if [ "$ended" -eq 0 ] || { [ "$ended" -eq 1 ] && grep -Eqs '"status": ?"completed"' "$work/$1"; }; then
        mv "$work/$1" "$out/$2"
        [ "$ended" -eq 0 ] || code=1
    else
        [ ! -e "$work/$1" ] || mv "$work/$1" "$out/$2.interrupted"
        exit $((ended ? ended : 1))
    fi
}

v1() {
    local run preset
    for run in "$@"; do
        preset=${run%:*}
        python $v1/tiny_llama_v1.py --preset "$preset" --num-steps "${run#*:}" --measure-peak --time-phases \
            --metrics-out "$out/v1_$preset.json"
        python $v1/tiny_llama_v1.py --preset "$preset" --num-steps 30 --profile-dir "$work/$preset" --metrics-out "$work/run.json"
        gzip --no-name --best --stdout "$work/$preset"/profile_*.json >"$out/v1_${preset}_profile.json.gz"
    done
}

ablation() {
    keep fusion_ablation.json "v2_ablation_$case.json" python $v2/fusion_ablation_study.py --all-combinations "${sizes[@]}"
}

at_the_preset() { # TARGET MODELS
    local duration=(--metrics throughput,memory)
    case $preset in medium | large)
        duration=(--metrics throughput,memory,energy --load-seconds 10 --timed-seconds 10) ;;
    esac
    keep benchmark.json "$1_$case.json" python $v2/benchmark_suite.py "${sizes[@]}" --batch-sizes preset --seq-lengths preset \
        --num-steps "$steps" "${duration[@]}" --repeats 3 --models "$2"
}

versions() {
    local models=v1,v1-captured,v2,v2-captured,v2-compile,v2-compile-captured,v3,v3-captured,v4
    models+=,hf,hf-compile,hf-compile-captured,liger,liger-compile-captured,captured
    [ "$precision" = fp32 ] || models+=,captured-bf16
    at_the_preset versions "$models"
}

determinism() {
    local model models=()
    for model in v1 v2-captured v2-compile-captured v3-captured v4; do
        models+=("$model" "$model-deterministic")
    done
    at_the_preset determinism "$(IFS=,; echo "${models[*]}")"
}

peer_traces() {
    local models=hf,hf-compile,hf-compile-captured,liger,liger-compile-captured,captured,captured-bf16
    mkdir -p "$out/traces"
    for run in "$@"; do
        python $v2/benchmark_suite.py --preset "${run%:*}" --use-amp --batch-sizes preset --seq-lengths preset --num-steps 1 \
            --metrics throughput,memory --repeats 1 --models $models --trace-dir "$out/traces" --output-dir "$work" || code=1
    done
}

formats() {
    [ "$precision" = fp32 ] || at_the_preset formats v4,v4-fp8
}

sequence() {
    for length in 128 256 512 1024; do
        run=(python $v2/tiny_llama_v2.py --seq-len $length --batch-size 4 --num-steps 3 --enable-memory-profiling)
        "${run[@]}" --metrics-out "$work/metrics.json" --profile-dir "$work/flash_attention_seq$length"
        "${run[@]}" --metrics-out "$work/metrics.json" --profile-dir "$work/plain_attention_seq$length" --disable-flash-attention
    done
    keep sequence_memory.json sequence_memory.json python $v2/analyze_sequence_memory.py --profile-dirs "$work"/*_seq*
}

kernels() {
    run=(python $v3/benchmark_kernels.py --use-amp --batch-size 4 --peers)
    "${run[@]}" --preset large --operations rms_norm add_rms_norm apply_rope swiglu --metrics-out "$out/kernels_memory.json" \
        --sizes {512,2048,4096}x{128,1024,8192}
    "${run[@]}" --preset large --operations linear_cross_entropy --metrics-out "$out/kernels_loss.json" \
        --sizes {512,4096}x{1024,4096}
    "${run[@]}" --preset small --operations attention --metrics-out "$out/kernels_attention_64.json" \
        --sizes 1024x{1024,2048,4096,8192}
    "${run[@]}" --preset medium --operations attention --metrics-out "$out/kernels_attention_128.json" \
        --sizes 2048x{1024,2048,4096,8192}
}

for part in $parts; do
    declare -F "$part" >/dev/null || { echo "error: there is no part '$part'" >&2; exit 2; }
done
for part in $parts; do
    case $part in v1 | sequence | kernels | peer_traces) "$part" "$@"; continue ;; esac
    for run in "$@"; do
        for precision in ${PRECISIONS:-fp32 bf16}; do
            preset=${run%:*} steps=${run#*:}
            case=${preset}_$precision sizes=(--preset "$preset")
            [ "$precision" = fp32 ] || sizes+=(--use-amp)
            "$part"
        done
    done
done
exit "$code"
