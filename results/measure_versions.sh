#!/usr/bin/env bash
# Compares the versions with each other and with transformers' LLaMA, on this machine, in fp32 and bf16. Some parts need a GPU. Writes
#
#     results/NAME/compare_PRESET_PRECISION_{v1,v2,v2_compiled,v3}.json    training runs, each a process of its own
#     results/NAME/v2_ablation_PRESET_PRECISION.json                       all 16 combinations of fusions, interleaved
#     results/NAME/benchmark_PRESET_PRECISION.json                         models of benchmark_suite.py over a grid of shapes
#     results/NAME/captured_PRESET_PRECISION.json                          versions with and without a captured step (GPU)
#     results/NAME/peers_PRESET_PRECISION.json                             all versions and external baselines (GPU)
#     results/NAME/sequence_memory.json                                    peak memory over the sequence length, fp32, tiny
#     results/NAME/kernels_*.json                                          Version 3's kernels and their peers, bf16 (GPU)
#     results/NAME/format_PRESET_{bf16,fp8}.json, format_curve_SEED_*.json Version 4's products in both formats (GPU)
#
#     results/measure_versions.sh NAME PARTS PRESET:STEPS...
#     results/measure_versions.sh h100 compare,ablation,benchmark,sequence,kernels tiny:100 small:100 medium:40
#
# Variables of the benchmark: MODELS (default: v1,v2,v2-compile,v3,hf,hf-compile; of peers: without FP8, which needs such a GPU,
# and torchao), BATCH_SIZES (4,8,16,32), SEQ_LENGTHS (128,256,512), METRICS (throughput,memory,accuracy), BENCHMARK_STEPS (50);
# also of captured and peers: REPEATS (3). Of all parts
# with PRECISION in the names of their files: PRECISIONS (fp32 bf16). Of the ablation: ROUNDS (5).
#
# A benchmark or ablation that is stopped leaves FILE.interrupted, and ends the script. The exit code is 1 if a model failed.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 NAME PARTS PRESET:STEPS..." >&2
    exit 2
fi
results=$(CDPATH='' cd "$(dirname "$0")" && pwd)
name=$1
parts=,$2,
shift 2
for part in ${parts//,/ }; do
    [[ ,compare,ablation,benchmark,captured,peers,sequence,kernels,formats, = *,$part,* ]] ||
        { echo "error: there is no part '$part'" >&2; exit 2; }
done
mkdir -p "$results/$name"
out=../results/$name # as seen from the version folders
cd "$results/../version2_pytorch_fused"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. "$results/keep.sh"

for run in "$@"; do
    preset=${run%:*}
    for precision in ${PRECISIONS:-fp32 bf16}; do
        common=(--preset "$preset")
        [ "$precision" = fp32 ] || common+=(--use-amp)
        if [[ $parts = *,compare,* ]]; then
            steps=(--num-steps "${run#*:}")
            file=$out/compare_${preset}_$precision
            python ../version1_pytorch_baseline/tiny_llama_v1.py "${common[@]}" "${steps[@]}" --metrics-out "${file}_v1.json"
            python tiny_llama_v2.py "${common[@]}" "${steps[@]}" --metrics-out "${file}_v2.json"
            python tiny_llama_v2.py "${common[@]}" "${steps[@]}" --enable-torch-compile --metrics-out "${file}_v2_compiled.json"
            python ../version3_triton/tiny_llama_v3.py "${common[@]}" "${steps[@]}" --metrics-out "${file}_v3.json"
        fi
        if [[ $parts = *,ablation,* ]]; then
            keep fusion_ablation.json "$out/v2_ablation_${preset}_$precision.json" \
                python fusion_ablation_study.py --all-combinations "${common[@]}" --rounds "${ROUNDS:-5}" --output-dir "$work"
        fi
        if [[ $parts = *,benchmark,* ]]; then
            keep benchmark.json "$out/benchmark_${preset}_$precision.json" \
                python benchmark_suite.py --models "${MODELS:-v1,v2,v2-compile,v3,hf,hf-compile}" "${common[@]}" \
                --batch-sizes "${BATCH_SIZES:-4,8,16,32}" --seq-lengths "${SEQ_LENGTHS:-128,256,512}" \
                --metrics "${METRICS:-throughput,memory,accuracy}" --repeats "${REPEATS:-3}" \
                --num-steps "${BENCHMARK_STEPS:-50}" --accuracy-steps 200 --output-dir "$work"
        fi
        at_the_preset=("${common[@]}" --batch-sizes preset --seq-lengths preset --num-steps "${run#*:}" --metrics throughput,memory
            --repeats "${REPEATS:-3}" --output-dir "$work")
        if [[ $parts = *,captured,* ]]; then
            models=v1,v1-captured,v2,v2-captured,v2-compile,v2-compile-captured,v3,v3-captured
            keep benchmark.json "$out/captured_${preset}_$precision.json" \
                python benchmark_suite.py "${at_the_preset[@]}" --models $models
        fi
        if [[ $parts = *,peers,* ]]; then
            models=v1,v2,v2-compile,v3,v4,hf,hf-compile,liger,liger-compile-captured,captured
            [ "$precision" = fp32 ] || models+=,captured-bf16,captured-tuned
            keep benchmark.json "$out/peers_${preset}_$precision.json" \
                python benchmark_suite.py "${at_the_preset[@]}" --models "${MODELS:-$models}"
        fi
    done
done
if [[ $parts = *,formats,* ]]; then
    for format in bf16 fp8; do
        train=(python ../version4_ultra_fused/tiny_llama_v4.py --use-amp)
        [ $format = bf16 ] || train+=(--enable-fp8)
        for run in "$@"; do
            "${train[@]}" --preset "${run%:*}" --num-steps "${run#*:}" --metrics-out "$out/format_${run%:*}_$format.json"
        done
        for seed in 0 1 2; do
            "${train[@]}" --preset small --num-steps 300 --seed $seed --learning-rate 1e-3 \
                --metrics-out "$out/format_curve_${seed}_$format.json"
        done
    done
fi
if [[ $parts = *,sequence,* ]]; then
    for seq_len in 128 256 512 1024; do
        run=(python tiny_llama_v2.py --seq-len "$seq_len" --batch-size 4 --num-steps 3 --enable-memory-profiling
            --metrics-out "$work/metrics.json")
        "${run[@]}" --profile-dir "$work/flash_attention_seq$seq_len"
        "${run[@]}" --profile-dir "$work/plain_attention_seq$seq_len" --disable-flash-attention
    done
    python analyze_sequence_memory.py --profile-dirs "$work"/*_seq* --output-dir "$work"
    mv "$work/sequence_memory.json" "$out/"
fi
if [[ $parts = *,kernels,* ]]; then
    cd ../version3_triton
    run=(python benchmark_kernels.py --use-amp --batch-size 4 --peers)
    sizes() { for hidden in $1; do for length in $2; do echo "${hidden}x$length"; done; done; }
    "${run[@]}" --preset large --operations rms_norm add_rms_norm apply_rope swiglu \
        --sizes $(sizes "512 2048 4096" "128 1024 8192") --metrics-out "$out/kernels_memory.json"
    "${run[@]}" --preset large --operations linear_cross_entropy --sizes $(sizes "512 4096" "1024 4096") \
        --metrics-out "$out/kernels_loss.json"
    "${run[@]}" --preset small --operations attention --sizes $(sizes 1024 "1024 2048 4096 8192") \
        --metrics-out "$out/kernels_attention_64.json"
    "${run[@]}" --preset medium --operations attention --sizes $(sizes 2048 "1024 2048 4096 8192") \
        --metrics-out "$out/kernels_attention_128.json"
fi
exit "$code"
