#!/usr/bin/env bash
# Profiles one training script with every available profiler, one after the other: PyTorch's, DeepSpeed's FLOPs profiler where it
# is installed, and on request those of the GPU's vendor.
#
#     bash run_all_profilers.sh [--profile-dir DIR] [--script FILE.py] [--enable-rocm-tools] [--] [ARGUMENTS OF THE SCRIPT]
#     bash run_all_profilers.sh --batch-size 8 --seq-len 128 --enable-rocm-tools --profile-dir ./complete_rocm_analysis
#
#     --enable-rocm-tools   also the profilers of the GPU's vendor: rocprofv3, rocprof-sys-run and rocprof-compute, or on an NVIDIA
#                           GPU their counterparts ncu and nsys
#
# The script names and skips a missing tool. The exit code is 0, or that of the first profiler that failed.
#
# Results:
#
#     DIR/profile_*.json, trace_*.json   PyTorch's profile and trace
#     DIR/deepspeed/flops_profile.json   FLOPs by two counters and a formula, MFU, for `run_deepspeed_flops.py --analyze-results`;
#                                        model_profile.txt beside it is DeepSpeed's report, module by module
#     DIR/rocprofv3/                     see run_rocprofv3.sh
#     DIR/rocprof_sys/                   see run_rocprof_sys.sh
#     DIR/rocprof_compute/               see run_rocprof_compute.sh
#     DIR/ncu/kernels.csv                one row per kernel launch: ns, bytes, percent of peak, spans; at most 1000, because ncu
#                                        runs each launch several times. Lines that begin with == are messages
#     DIR/nsys/timeline.nsys-rep         timeline, for the Nsight Systems window or `nsys stats`
#     DIR/nsys/timeline.sqlite           the same, for `python page.py DIR/nsys`: why the GPU waits, by cause

set -euo pipefail
here=$(dirname "$0")
. "$(dirname "${BASH_SOURCE[0]}")/profilers.sh"
folder=./complete_analysis
vendor_tools=false
own_flag() { [ "$1" = --enable-rocm-tools ] && vendor_tools=true; }
parse "$@"
set -- ${arguments[@]+"${arguments[@]}"} # before bash 4.4 an empty array is an unset variable

attempt() { # TOOL COMMAND...
    local failed=0
    "${@:2}" || failed=$?
    if [ "$failed" -ne 0 ]; then
        echo "$1 failed with exit code $failed" >&2
        keep_first "$failed"
    fi
}

# First without any tool around it: a script that fails here is not profiled further.
echo "PyTorch profiler: $script, into $folder" >&2
python "$script" --metrics-out "$folder/metrics.json" --num-steps 30 "$@" --enable-pytorch-profiler --profile-dir "$folder"
if begin deepspeed "FLOPs by module" "$folder/deepspeed"; then
    attempt deepspeed python "$script" --metrics-out "$folder/deepspeed/metrics.json" --num-steps 10 --measure-peak "$@" \
        --flops-dir "$folder/deepspeed"
fi
[ "$vendor_tools" = true ] || exit "$code"
if nvidia-smi -L >/dev/null 2>&1; then
    if begin ncu "times and bytes of the kernels" "$folder/ncu"; then
        csv=$folder/ncu/kernels.csv metrics=gpu__time_duration.sum
        metrics+=,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum
        metrics+=,sm__throughput.avg.pct_of_peak_sustained_elapsed,gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed
        rm -f "$csv"
        # ncu repeats each kernel for each group of counters and empties the caches before it: times and bytes are those of a
        # kernel that finds its data in memory. The clocks stay as a training run has them.
        attempt ncu ncu --clock-control none --nvtx --launch-count 1000 --metrics "$metrics" \
            --csv --page raw --print-units base --log-file "$csv" \
            python "$script" --metrics-out "$folder/ncu/metrics.json" --warmup-steps 1 --num-steps 1 "$@"
        attempt "looking for kernels in $csv" grep -qs '"Kernel Name"' "$csv" # an exit code of 0 can be the script's
    fi
    if begin nsys "timeline of host and GPU" "$folder/nsys"; then
        attempt nsys nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --force-overwrite=true \
            --output="$folder/nsys/timeline" python "$script" --metrics-out "$folder/nsys/metrics.json" --num-steps 30 "$@"
        attempt "nsys export" nsys export --type=sqlite --force-overwrite=true \
            --output="$folder/nsys/timeline.sqlite" "$folder/nsys/timeline.nsys-rep"
        echo "page: python page.py $folder/nsys" >&2
    fi
else
    attempt rocprofv3 bash "$here/run_rocprofv3.sh" --profile-dir "$folder/rocprofv3" --script "$script" --marker-trace -- "$@"
    attempt rocprof-sys-run bash "$here/run_rocprof_sys.sh" --profile-dir "$folder/rocprof_sys" --script "$script" -- "$@"
    attempt rocprof-compute bash "$here/run_rocprof_compute.sh" --profile-dir "$folder/rocprof_compute" --script "$script" -- "$@"
fi
exit "$code"
