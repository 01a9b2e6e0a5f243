#!/usr/bin/env bash
# Records what host and AMD GPU do over time while a training script runs, with rocprof-sys-run.
#
#     bash run_rocprof_sys.sh [--profile-dir DIR] [--script FILE.py] [--] [ARGUMENTS OF THE SCRIPT]
#
#     --profile-dir DIR   where results go (default: ./complete_analysis/rocprof_sys)
#     --script FILE.py    what to run (default: tiny_llama_v2.py beside this file)
#
# Every other argument goes to the script, which takes 30 steps unless --num-steps says otherwise. Its metrics file goes into
# DIR, so that the step times of a profiled run do not replace measured ones.
#
# Results:
#
#     DIR/TIME/perfetto-trace-PID.proto   the timeline, for https://ui.perfetto.dev
#     DIR/TIME/wall_clock-PID.txt, .json  calls and time by call stack

set -euo pipefail
. "$(dirname "$0")/profilers.sh"
folder=./complete_analysis/rocprof_sys
arguments=(--num-steps 30) # where a flag comes twice the script takes the later one, here the user's
parse "$@"

begin rocprof-sys-run "timeline of host and GPU" "$folder" || exit 0
exec rocprof-sys-run --output "$folder" --profile --trace -- \
    python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
