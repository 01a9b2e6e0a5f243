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
folder=./complete_analysis/rocprof_sys
script=$(dirname "$0")/tiny_llama_v2.py
arguments=(--num-steps 30) # where a flag comes twice the script takes the later one, here the user's

fail() {
    echo "error: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;;
        --profile-dir=* | --script=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --profile-dir) folder=${2-}; shift 2 || fail "--profile-dir needs a folder" ;;
        --script) script=${2-}; shift 2 || fail "--script needs a Python file" ;;
        --) arguments+=("${@:2}"); break ;;
        *) arguments+=("$1"); shift ;;
    esac
done
[ -f "$script" ] || fail "there is no script '$script': name one with --script FILE.py"

if ! command -v rocprof-sys-run >/dev/null; then
    echo "rocprof-sys-run is not on PATH: skipped the timeline of host and GPU" >&2
    exit
fi
mkdir -p "$folder" || exit 2
echo "rocprof-sys-run: timeline of $script, into $folder" >&2
exec rocprof-sys-run --output "$folder" --profile --trace -- \
    python "$script" --metrics-out "$folder/metrics.json" "${arguments[@]}"
