#!/usr/bin/env bash
# Records the activity of the host and the AMD GPU over time while a training script runs, with rocprof-sys-run.
#
#     bash run_rocprof_sys.sh [--profile-dir DIR] [--script FILE.py] [--] [ARGUMENTS OF THE SCRIPT]
#
# Results:
#
#     DIR/TIME/perfetto-trace-PID.proto   the timeline, for https://ui.perfetto.dev (.pftrace in later releases)
#     DIR/TIME/wall_clock-PID.txt, .json  calls and time by call stack

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/profilers.sh"
folder=./complete_analysis/rocprof_sys
start rocprof-sys-run "timeline of host and GPU" 30 "$@"
# Since ROCm 7.14 formats have names, which exclude the two flags; since 10.1 the default is a database. The help is short since 7.13.
case $(rocprof-sys-run --help=all 2>/dev/null || true) in
    *--output-format*) formats=(--output-format proto,text,json) ;;
    *) formats=(--profile --trace) ;;
esac
exec rocprof-sys-run --output "$folder" "${formats[@]}" -- \
    python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
