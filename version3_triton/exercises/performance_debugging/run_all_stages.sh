#!/usr/bin/env bash
# Runs Version 1 and all stages, each without and with its fix, on the GPU if there is one, and compares them.
#
#     ./run_all_stages.sh [--results-dir DIR] [--stages "0 1 2"] [ARGUMENTS OF EVERY RUN]
#     ./run_all_stages.sh --num-steps 100 --seed 1
#
#     --results-dir DIR   where results go (default: ./results)
#     --stages LIST       the stages to run; the others keep their results (default: "0 1 2 3 4 5 6"; 0 is Version 1)
#
# Every other argument goes to every run, after the arguments for the device. On a GPU these are the preset medium with fewer and
# wider layers and a larger batch, so that launches do not limit it, in bfloat16; on a CPU a small model and a long sequence. Only
# equal configurations can be compared. The exit code is 0, or that of the first run that failed. Wrong input (2) ends the script.
#
# Results:
#
#     DIR/stageN_output.log, stageN_fixed_output.log        output of the runs
#     DIR/stageN_metrics.json, stageN_fixed_metrics.json    their records
#     DIR/stageN_profile.csv                                times of kernels by rocprofv3 if it is installed, otherwise of kernels
#                                                           (on a CPU: operators) by torch.profiler
#     DIR/stageN_profile/                                   the profiler's own files, such as the trace
#     DIR/comparison.md                                     the comparison, which is also printed

set -euo pipefail
here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
root=$here/../../..
folder=./results
stages="0 1 2 3 4 5 6"
arguments=()
code=0
trap 'exit 130' INT # the training script handles Ctrl-C by itself; without this line the next run would start

fail() {
    echo "error: $1" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;;
        --results-dir) folder=${2-}; shift 2 || fail "$1 needs a value" ;;
        --stages) stages=${2-}; shift 2 || fail "$1 needs a value" ;;
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
done
mkdir -p "$folder" || exit 2

device=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
case " ${arguments[*]-} " in *" --device cpu "*) device=cpu ;; esac
size=(--num-kv-heads 2) # stage 2 has this default, and all stages must be equal
if [ "$device" = cuda ]; then
    size+=(--preset medium --num-layers 4 --hidden-dim 2048 --num-heads 16 --intermediate-dim 5632 --batch-size 32
        --use-amp --num-steps 60)
else
    size+=(--num-layers 2 --hidden-dim 128 --num-heads 8 --intermediate-dim 256 --batch-size 1 --seq-len 1024 --num-steps 40)
fi
arguments=("${size[@]}" --time-phases --measure-peak ${arguments[@]+"${arguments[@]}"}) # before bash 4.4 an empty array is unset
echo "every run: ${arguments[*]}" >&2

run() { # NAME SCRIPT ARGUMENTS...: adds to the log of that name
    echo "$1: $(basename "$2") ${*:3}" >&2
    python "$2" --metrics-out "$folder/$1_metrics.json" "${arguments[@]}" "${@:3}" >>"$folder/$1_output.log" 2>&1
}

measure() { # NAME SCRIPT ARGUMENTS...: a run and a profile
    if [ "$device" = cuda ] && command -v rocprofv3 >/dev/null; then
        run "$@" && bash "$root/version2_pytorch_fused/run_rocprofv3.sh" --profile-dir "$folder/$1_profile" --script "$2" -- \
            "${arguments[@]}" "${@:3}" --num-steps 5 >>"$folder/$1_output.log" 2>&1
    else
        run "$@" --profile-dir "$folder/$1_profile"
    fi && python "$root/version2_pytorch_fused/analyze_kernel_launches.py" --trace-file "$folder/$1_profile" \
        --csv-out "$folder/$1_profile.csv" >>"$folder/$1_output.log" 2>&1
}

tried() { # NAME COMMAND...: goes on after a failed run, but not after wrong input or a signal
    local failed=0
    rm -f "$folder/$1_output.log"
    "${@:2}" || failed=$?
    [ "$failed" = 0 ] && return
    echo "$1 failed with exit code $failed: $(tail -n 1 "$folder/$1_output.log")" >&2
    [ "$code" -ne 0 ] || code=$failed
    [ "$failed" -ne 2 ] && [ "$failed" -le 128 ] || exit "$failed"
}

for stage in $stages; do
    file=$(file_of "$stage")
    case $stage in
        6) tried stage6 measure stage6 "$file" --skip-check ;; # the harness refuses it otherwise
        *) tried "stage$stage" measure "stage$stage" "$file" ;;
    esac
    case $stage in 0 | 5) ;; *) tried "stage${stage}_fixed" run "stage${stage}_fixed" "$file" --fixed ;; esac
done
echo >&2
python "$here/compare_stages.py" --results-dir "$folder" --output "$folder/comparison.md" || exit
exit "$code"
