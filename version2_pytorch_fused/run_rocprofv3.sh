#!/usr/bin/env bash
# Times every kernel of a training script on an AMD GPU, with rocprofv3.
#
#     bash run_rocprofv3.sh [--profile-dir DIR] [--script FILE.py] [--marker-trace] [--] [ARGUMENTS OF THE SCRIPT]
#
#     --profile-dir DIR   where results go (default: ./complete_analysis/rocprofv3)
#     --script FILE.py    what to run (default: tiny_llama_v2.py beside this file)
#     --marker-trace      also record the spans (embed, norm, attention, ...), which the script emits as roctx ranges
#
# Every other argument goes to the script, which takes 30 steps unless --num-steps says otherwise. Its metrics file goes into
# DIR, so that the step times of a profiled run do not replace measured ones.
#
# Results, where PROCESS is HOSTNAME/PID:
#
#     DIR/PROCESS_kernel_stats.csv       one row per kernel: calls, total, mean, least and greatest duration in ns
#     DIR/PROCESS_kernel_trace.csv       one row per launch: start and end in ns, grid, registers, LDS
#     DIR/PROCESS_marker_api_trace.csv   with --marker-trace: one row per span
#
# `--output-format csv` is what makes the statistics: since ROCm 7.0 the default is a database without them.

set -euo pipefail
. "$(dirname "$0")/profilers.sh"
folder=./complete_analysis/rocprofv3
options=(--kernel-trace --stats --truncate-kernels --output-format csv)
arguments=(--num-steps 30) # where a flag comes twice the script takes the later one, here the user's
own_flag() { [ "$1" = --marker-trace ] && options+=("$1"); }
parse "$@"

begin rocprofv3 "times of the kernels" "$folder" || exit 0
exec rocprofv3 "${options[@]}" -d "$folder" -- python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
