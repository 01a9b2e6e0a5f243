#!/usr/bin/env bash
# Times every kernel of a training script on an AMD GPU, with rocprofv3.
#
#     bash run_rocprofv3.sh [--profile-dir DIR] [--script FILE.py] [--marker-trace] [--] [ARGUMENTS OF THE SCRIPT]
#
#     --marker-trace   also record the spans (embed, norm, attention, ...), which the script emits as roctx ranges
#
# Results, where PROCESS is HOSTNAME/PID:
#
#     DIR/PROCESS_kernel_stats.csv       one row per kernel: calls, total, mean, minimum and maximum duration in ns
#     DIR/PROCESS_kernel_trace.csv       one row per launch: start and end in ns, grid, registers, LDS
#     DIR/PROCESS_marker_api_trace.csv   with --marker-trace: one row per span

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/profilers.sh"
folder=./complete_analysis/rocprofv3
# Since ROCm 7.0 the default output is a database without statistics.
options=(--kernel-trace --stats --truncate-kernels --output-format csv)
own_flag() { [ "$1" = --marker-trace ] && options+=("$1"); }
start rocprofv3 "times of the kernels" 30 "$@"
exec rocprofv3 "${options[@]}" -d "$folder" -- python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
