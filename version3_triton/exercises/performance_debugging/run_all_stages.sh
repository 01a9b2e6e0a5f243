#!/usr/bin/env bash
# Runs Version 1 and all stages, each as it is and with its fix, on whatever device there is, and compares them.
#
#     ./run_all_stages.sh [--results-dir DIR] [--stages "0 1 2"] [--] [ARGUMENTS OF EVERY RUN]
#     ./run_all_stages.sh --num-steps 100 --seed 1
#
#     --results-dir DIR   where results go (default: ./results)
#     --stages LIST       which to run; the others keep their results (default: "0 1 2 3 4 5 6"; 0 is Version 1)
#
# Every other argument goes to every run, after those for the device: on a GPU the preset medium with fewer and wider layers and a
# larger batch, so that launches are not its limit, in bfloat16; on a CPU a small model and a long sequence. All runs must be alike
# to be compared. The exit code is 0, or that of the first run that failed.
#
# Results:
#
#     DIR/stageN_output.log, stageN_fixed_output.log        what the runs printed
#     DIR/stageN_metrics.json, stageN_fixed_metrics.json    their records
#     DIR/stageN_profile.csv                                times of kernels by rocprofv3 where there is one, or else of kernels
#                                                           (on a CPU: operators) by torch.profiler
#     DIR/stageN_profile/                                   what the profiler itself wrote, such as the trace
#     DIR/comparison.md                                     the comparison, which is also printed

set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=./results
stages="0 1 2 3 4 5 6"
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;;
        --results-dir | --stages)
            [ $# -gt 1 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            if [ "$1" = --stages ]; then stages=$2; else folder=$2; fi
            shift 2 ;;
        --) shift; arguments+=("$@"); break ;;
        *) arguments+=("$1"); shift ;;
    esac
done
script() { # STAGE: its file
    if [ "$1" = 0 ]; then
        echo "$here/../../../version1_pytorch_baseline/tiny_llama_v1.py"
    else
        echo "$here/v3_stage$1_"*.py
    fi
}
for stage in $stages; do
    [ -f "$(script "$stage")" ] || { echo "error: there is no stage '$stage': --stages takes numbers, 0 to 6" >&2; exit 2; }
done
mkdir -p "$folder"
trap 'exit 130' INT # a run ends in good order on Ctrl-C, and without this the next would begin

device=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
case " ${arguments[*]-} " in *" --device cpu "* | *" --device=cpu "*) device=cpu ;; esac
size=(--num-kv-heads 2) # which is stage 2's default, and must be everyone's
if [ "$device" = cuda ]; then
    size+=(--preset medium --num-layers 4 --hidden-dim 2048 --num-heads 16 --intermediate-dim 5632 --batch-size 32
        --use-amp --num-steps 60)
else
    size+=(--num-layers 2 --hidden-dim 128 --num-heads 8 --intermediate-dim 256 --batch-size 1 --seq-len 512 --num-steps 40)
fi
size+=(--time-phases --measure-peak)
arguments=("${size[@]}" ${arguments[@]+"${arguments[@]}"}) # to bash before 4.4 an empty array is an unset variable
echo "every run: ${arguments[*]}" >&2

code=0
keep_first() { # CODE
    [ "$code" -ne 0 ] || code=$1
}

failed() { # NAME CODE
    echo "$1 failed with exit code $2: see $folder/$1_output.log" >&2
    keep_first "$2"
}

run() { # NAME SCRIPT ARGUMENTS...: adds to the log of that name
    echo "$1: $(basename "$2") ${*:3}" >&2
    python "$2" --metrics-out "$folder/$1_metrics.json" "${arguments[@]}" "${@:3}" >>"$folder/$1_output.log" 2>&1
}

profile() { # NAME SCRIPT ARGUMENTS...: a run of a few steps under rocprofv3
    rocprofv3 --kernel-trace --stats --truncate-kernels --output-format csv -d "$folder/$1_profile" -- \
        python "$2" --metrics-out "$folder/$1_profile/metrics.json" "${arguments[@]}" "${@:3}" --num-steps 5 \
        >>"$folder/$1_output.log" 2>&1
}

measure() { # NAME SCRIPT ARGUMENTS...: run and profile
    if [ "$device" = cuda ] && command -v rocprofv3 >/dev/null; then
        run "$@" && mkdir -p "$folder/$1_profile" && profile "$@"
    else
        run "$@" --profile-dir "$folder/$1_profile"
    fi && python "$here/stage_profile.py" "$folder/$1_profile" --csv "$folder/$1_profile.csv" >>"$folder/$1_output.log" 2>&1
}

for stage in $stages; do
    name=stage$stage
    file=$(script "$stage")
    rm -rf "$folder/$name"_*
    if [ "$stage" = 6 ]; then
        refused=0
        run $name "$file" || refused=$? # the harness finds it, with exit code 1; then once more without its check
        if [ $refused != 1 ]; then
            echo "$name was not refused (exit code $refused): see $folder/${name}_output.log" >&2
            keep_first $((refused ? refused : 1))
        fi
        measure $name "$file" --skip-check || failed $name $?
    else
        measure $name "$file" || failed $name $?
    fi
    case $stage in 0 | 5) ;; *) run ${name}_fixed "$file" --fixed || failed ${name}_fixed $? ;; esac
done
echo >&2
python "$here/compare_stages.py" --results-dir "$folder" --output "$folder/comparison.md" || keep_first $?
exit "$code"
