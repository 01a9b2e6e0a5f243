#!/usr/bin/env bash
# Collects hardware counters and a roofline of a training script on an AMD Instinct GPU, with rocprof-compute.
#
#     bash run_rocprof_compute.sh [--profile-dir DIR] [--script FILE.py] [--] [ARGUMENTS OF THE SCRIPT]
#
#     --profile-dir DIR   where results go (default: ./complete_analysis/rocprof_compute)
#     --script FILE.py    what to run (default: tiny_llama_v2.py beside this file)
#
# Only a few counters count at a time, so the tool runs the script again for each group of them: 12 to 24 times for all, a few
# times for the roofline. Therefore the script takes 3 steps unless --num-steps says otherwise. All other arguments go to the
# script too (old releases of the tool split them at spaces). Its metrics file goes into DIR.
#
# To read the results, on any machine that has the tool:
#
#     rocprof-compute analyze -p DIR/counters --list-stats
#     rocprof-compute analyze -p DIR/roofline
#
# Since release 3.6.0 it is `analyze` that writes DIR/counters/pmc_perf.csv, the table that analyze_kernel_launches.py reads.

set -euo pipefail
. "$(dirname "$0")/profilers.sh"
folder=./complete_analysis/rocprof_compute
arguments=(--num-steps 3) # where a flag comes twice the script takes the later one, here the user's
parse "$@"

begin rocprof-compute "hardware counters and roofline" "$folder" || exit 0
folder=$(cd "$folder" && pwd) # the tool takes no path with .. in it
trap 'exit 130' INT           # the script ends in good order on Ctrl-C, and without this the next profile would begin

# Options that only some releases have. If the tool is too broken to print its help, profiling will say why.
help=$(rocprof-compute profile --help 2>/dev/null || true)
case $help in
    *--output-directory*) directory=--output-directory ;;
    *) directory=--path ;; # before 3.5.0
esac

profile() { # NAME OPTION...
    local options=(-n "$1" "${@:2}" "$directory" "$folder/$1")
    case $help in
        *--overwrite*) options+=(--overwrite) ;; # since 3.8.0 needed where an earlier profile lies
    esac
    rocprof-compute profile "${options[@]}" -- python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
}

counters=0 roofline=0
profile counters --no-roof || counters=$?
profile roofline --roof-only --device 0 || roofline=$?
exit $((counters ? counters : roofline))
