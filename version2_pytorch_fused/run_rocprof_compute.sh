#!/usr/bin/env bash
# Collects hardware counters and a roofline of a training script on an AMD Instinct GPU, with rocprof-compute.
#
#     bash run_rocprof_compute.sh [--profile-dir DIR] [--script FILE.py] [--] [ARGUMENTS OF THE SCRIPT]
#
# The GPU counts only a few events at a time, so the tool runs the script again for each group of counters: 12 to 24 times for
# all, a few times for the roofline. Old releases of the tool split the script's arguments at spaces.
#
# To read the results, on any machine that has the tool:
#
#     rocprof-compute analyze -p DIR/counters --list-stats
#     rocprof-compute analyze -p DIR/roofline
#
# Since release 3.6.0 it is `analyze` that writes DIR/counters/pmc_perf.csv, the table that analyze_kernel_launches.py reads.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/profilers.sh"
folder=./complete_analysis/rocprof_compute
start rocprof-compute "hardware counters and roofline" 3 "$@"
folder=$(cd "$folder" && pwd) # the tool takes no path with .. in it

# Options that only some releases have. If the tool cannot print its help, profiling will report the error.
help=$(rocprof-compute profile --help 2>/dev/null || true)
case $help in
    *--output-directory*) directory=--output-directory ;;
    *) directory=--path ;; # before 3.5.0
esac

case $help in
    *--roofline-device*) roofline=(--roofline --roofline-device 0) ;; # since 3.10; the old names are deprecated
    *) roofline=(--roof-only --device 0) ;;
esac

profile() { # NAME OPTION...
    local options=(-n "$1" "${@:2}" "$directory" "$folder/$1")
    case $help in
        *--overwrite*) options+=(--overwrite) ;; # since 3.8.0 required if an earlier profile exists
    esac
    rocprof-compute profile "${options[@]}" -- python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
}

profile counters --no-roof || keep_first $?
profile roofline "${roofline[@]}" || keep_first $?
exit "$code"
