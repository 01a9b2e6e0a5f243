#!/usr/bin/env bash
# Runs Version 1 and all stages, each without and with its fix, on the GPU if there is one, and compares them.
#
#     ./run_all_stages.sh [--results-dir DIR] [--stages "0 1 2"] [--] [ARGUMENTS OF EVERY RUN]
#     ./run_all_stages.sh --num-steps 100 --seed 1
#
#     --results-dir DIR   where results go (default: ./results)
#     --stages LIST       the stages to run; the others keep their results (default: "0 1 2 3 4 5 6"; 0 is Version 1)
#
# Every other argument goes to every run, after the arguments for the device. On a GPU these are the preset medium with fewer and
# wider layers and a larger batch, so that launches do not limit it, in bfloat16; on a CPU a small model and a long sequence. Only
# equal configurations can be compared. The exit code is 0, or that of the first run that failed.
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
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../../..
. "$root/version2_pytorch_fused/profilers.sh"
folder=./results
stages="0 1 2 3 4 5 6"
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) head_of_script; exit ;;
        --results-dir) folder=${2-}; shift 2 || fail "$1 needs a value" ;;
        --stages) stages=${2-}; shift 2 || fail "$1 needs a value" ;;
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
done
mkdir -p "$folder"

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
echo "every run: ${arguments[*]}" >&2

failed() { # NAME CODE
    echo "$1 failed with exit code $2: see $folder/$1_output.log" >&2
    keep_first "$2"
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
    fi && python "$here/stage_profile.py" "$folder/$1_profile" --csv "$folder/$1_profile.csv" >>"$folder/$1_output.log" 2>&1
}

for stage in $stages; do
    name=stage$stage
    file=$(file_of "$stage")
    rm -rf "$folder/$name"_*
    if [ "$stage" = 6 ]; then
        refused=0
        run "$name" "$file" || refused=$? # the harness refuses it with exit code 1; then a run without this check
        if [ "$refused" != 1 ]; then
            echo "$name was not refused (exit code $refused): see $folder/${name}_output.log" >&2
            keep_first $((refused ? refused : 1))
        fi
        measure "$name" "$file" --skip-check || failed "$name" $?
    else
        measure "$name" "$file" || failed "$name" $?
    fi
    case $stage in 0 | 5) ;; *) run "${name}_fixed" "$file" --fixed || failed "${name}_fixed" $? ;; esac
done
echo >&2
python "$here/compare_stages.py" --results-dir "$folder" --output "$folder/comparison.md" || keep_first $?
exit "$code"
