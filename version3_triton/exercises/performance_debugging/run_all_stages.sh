#!/usr/bin/env bash
# Runs Version 1 and all stages, each without and with its fix, on the GPU if there is one, and compares them.
#
#     ./run_all_stages.sh [--results-dir DIR] [--stages "0 1 2"] [--through N] [--] [ARGUMENTS OF EVERY RUN]
#     ./run_all_stages.sh --through 4 --num-steps 100 --seed 1
#
#     --results-dir DIR   where results go (default: ./results)
#     --stages LIST       the stages to run; the others keep their results (default: "0 1 2 3 4 5 6"; 0 is Version 1)
#     --through N         also repairs.py: the faults of stages 1 to 4 in one program, then repaired one after the other, 1 to N
#
# Every other argument goes to every run, after the arguments for the device. On a GPU these are the preset medium with fewer and
# wider layers and a larger batch, so that launches do not limit it, in bfloat16; on a CPU a small model and a long sequence. Only
# equal configurations can be compared. The exit code is 0, or that of the first run that failed.
#
# The arguments are checked before the first run. A run replaces the earlier results of its name only when it has succeeded;
# otherwise they stay, and its own go to DIR/failed. Wrong input (exit code 2) and a signal end the script.
#
# Results:
#
#     DIR/stageN_output.log, stageN_fixed_output.log        output of the runs
#     DIR/stageN_metrics.json, stageN_fixed_metrics.json    their records
#     DIR/throughN_output.log, throughN_metrics.json        the same of repairs.py
#     DIR/stageN_profile.csv                                times of kernels by rocprofv3 if it is installed, otherwise of kernels
#                                                           (on a CPU: operators) by torch.profiler
#     DIR/stageN_profile/                                   the profiler's own files, such as the trace
#     DIR/comparison.md                                     the comparison, which is also printed
#     DIR/failed/                                           the records and profiles of runs that failed or were stopped

set -euo pipefail
here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
root=$here/../../..
. "$here/../../../common/profilers.sh"
folder=./results
stages="0 1 2 3 4 5 6"
through=
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) head_of_script; exit ;;
        --results-dir=* | --stages=* | --through=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --results-dir) folder=${2-}; shift 2 || fail "$1 needs a value" ;;
        --stages) stages=${2-}; shift 2 || fail "$1 needs a value" ;;
        --through)
            through=${2-}
            case $through in [0-4]) shift 2 ;; *) fail "--through takes a number, 0 to 4" ;; esac
            ;;
        --) arguments+=("${@:2}"); break ;;
        *) arguments+=("$1"); shift ;;
    esac
done
file_of() { # STAGE
    case $1 in
        0) echo "$root/version1_pytorch_baseline/tiny_llama_v1.py" ;;
        *) echo "$here/v3_stage$1_"*.py ;;
    esac
}
for stage in $stages; do
    [ -f "$(file_of "$stage")" ] || fail "there is no stage '$stage': --stages takes numbers, 0 to 6"
    files+=("$(file_of "$stage")")
done
[ -n "${files-}" ] || fail "--stages names no stage: it takes numbers, 0 to 6"
[ -z "$through" ] || files+=("$here/repairs.py")
mkdir -p "$folder" || exit 2

device=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
case " ${arguments[*]-} " in *" --device cpu "* | *" --device=cpu "*) device=cpu ;; esac
size=(--num-kv-heads 2) # stage 2 has this default, and all stages must be equal
if [ "$device" = cuda ]; then
    size+=(--preset medium --num-layers 4 --hidden-dim 2048 --num-heads 16 --intermediate-dim 5632 --batch-size 32
        --use-amp --num-steps 60)
else
    size+=(--num-layers 2 --hidden-dim 128 --num-heads 8 --intermediate-dim 256 --batch-size 1 --seq-len 512 --num-steps 40)
fi
arguments=("${size[@]}" --time-phases --measure-peak ${arguments[@]+"${arguments[@]}"}) # before bash 4.4 an empty array is unset
python "$here/check_arguments.py" "${files[@]}" -- "${arguments[@]}" || exit
echo "every run: ${arguments[*]}" >&2

earlier=$folder/.earlier # results of the name in hand, while its run may still fail
name=
move() { # FROM TO: the results of the name in hand, in the place of those that are there
    local kind
    for kind in metrics.json profile.csv profile; do
        [ -e "$1/${name}_$kind" ] || continue
        mkdir -p "$2" && rm -rf "$2/${name:?}_$kind" && mv "$1/${name}_$kind" "$2" || exit 2
    done
}
give_back() { # the earlier results come back, and what the run has left goes aside
    [ -n "$name" ] || return 0
    move "$folder" "$folder/failed"
    move "$earlier" "$folder"
    name=
}
trap give_back EXIT
trap 'exit 143' TERM
trap 'exit 129' HUP

replace() { # NAME COMMAND...: the results of a name by those of a command
    local failed=0
    name=$1
    move "$folder" "$earlier"
    rm -f "$folder/${name}_output.log"
    "${@:2}" || failed=$?
    if [ "$failed" != 0 ]; then
        echo "$name failed with exit code $failed: see $folder/${name}_output.log" >&2
        give_back
    fi
    name=
    rm -rf "$earlier"
    [ "$failed" -ne 2 ] && [ "$failed" -le 128 ] || exit "$failed"
    keep_first "$failed"
}

run() { # NAME SCRIPT ARGUMENTS...: adds to the log of that name
    echo "$1: $(basename "$2") ${*:3}" >&2
    python "$2" --metrics-out "$folder/$1_metrics.json" "${arguments[@]}" "${@:3}" >>"$folder/$1_output.log" 2>&1
}

profile() { # NAME SCRIPT ARGUMENTS...: a run of a few steps under rocprofv3
    bash "$root/version2_pytorch_fused/run_rocprofv3.sh" --profile-dir "$folder/$1_profile" --script "$2" -- \
        "${arguments[@]}" "${@:3}" --num-steps 5 >>"$folder/$1_output.log" 2>&1
}

measure() { # NAME SCRIPT ARGUMENTS...: run and profile
    if [ "$device" = cuda ] && command -v rocprofv3 >/dev/null; then
        run "$@" && profile "$@"
    else
        run "$@" --profile-dir "$folder/$1_profile"
    fi && python "$here/top_kernels.py" "$folder/$1_profile" --csv-out "$folder/$1_profile.csv" >>"$folder/$1_output.log" 2>&1
}

unchecked() { # NAME SCRIPT: the harness refuses stage 6 with exit code 1; then a run without this check
    local refused=0
    run "$@" || refused=$?
    if [ "$refused" != 1 ]; then
        echo "$1 was not refused (exit code $refused): see $folder/$1_output.log" >&2
        keep_first $((refused ? refused : 1))
    fi
    measure "$@" --skip-check
}

for stage in $stages; do
    file=$(file_of "$stage")
    case $stage in
        6) replace "stage$stage" unchecked "stage$stage" "$file" ;;
        *) replace "stage$stage" measure "stage$stage" "$file" ;;
    esac
    case $stage in 0 | 5) ;; *) replace "stage${stage}_fixed" run "stage${stage}_fixed" "$file" --fixed ;; esac
done
for ((number = 0; number <= ${through:--1}; number++)); do
    replace "through$number" run "through$number" "$here/repairs.py" --through "$number"
done
echo >&2
python "$here/compare_stages.py" --results-dir "$folder" --output "$folder/comparison.md" || keep_first $?
exit "$code"
