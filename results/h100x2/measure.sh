#!/usr/bin/env bash
# Version 4 on two GPUs, apart and together, in version4_ultra_fused: the records of this folder, in DIR, and samples of the clock.
set -eu
folder=$1
export NCCL_NVLS_ENABLE=0
nvidia-smi --query-gpu=timestamp,index,utilization.gpu,power.draw.instant,power.draw,clocks.sm,clocks_event_reasons.active \
    --format=csv,noheader,nounits -lms 100 >"$folder/samples.csv" &
trap 'kill %1' EXIT
for run in large:60 medium:200; do
    preset=${run%:*}
    flags=(tiny_llama_v4.py --use-amp --data synthetic --preset "$preset" --num-steps "${run#*:}")
    for gpu in 0 1; do
        CUDA_VISIBLE_DEVICES=$gpu python "${flags[@]}" --metrics-out "$folder/alone_${preset}_$gpu.json" &
        processes[gpu]=$!
    done
    wait "${processes[@]}"
    for form in ddp zero1; do
        torchrun --standalone --nproc-per-node 2 "${flags[@]}" --parallel $form --metrics-out "$folder/${form}_$preset.json"
    done
done
# clocks.csv: the samples with a use of 99% or more and above 500 W, from 8 s before a run's steps to 8 s after its record.
