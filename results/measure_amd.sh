#!/usr/bin/env bash
# Measures an AMD GPU: all versions at all presets in bf16.
#
#     results/measure_amd.sh [--plan] NAME     NAME: mi210, mi250x, mi300a, mi300x, mi325x or mi355x
#
# It should take half an hour on one GPU, but none has run it. A file that is there is not measured again, so the same command goes
# on where an earlier one ended. --plan prints the files that are left to write, and runs nothing. Writes
#
#     results/NAME/peers_PRESET_bf16.json      the versions at a preset (measure_versions.sh); one that does not fit says so
#     results/NAME/v1_PRESET.json, ..._profile.json.gz     Version 1, its ceilings and its profile (measure_v1.sh)
#     results/NAME/profiles/TOOL_VERSION/      rocprofv3 of each version at small; of the last also rocprof-sys and rocprof-compute
#
# A tool that is not on PATH is named and skipped. The exit code is 0, or that of the first command that failed; the rest goes on.
set -euo pipefail
plan=
if [ "${1:-}" = --plan ]; then
    plan=yes
    shift
fi
if [ $# -ne 1 ] || [[ $1 = -* ]]; then
    echo "usage: $0 [--plan] NAME" >&2
    exit 2
fi
results=$(CDPATH='' cd "$(dirname "$0")" && pwd)
root=$results/..
out=$results/$1
if [ -z "$plan" ] && ! python -c 'import sys, torch; sys.exit(not (torch.version.hip and torch.cuda.is_available()))'; then
    echo "error: PyTorch sees no AMD GPU here: make preflight says why" >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
code=0

cell() { # FILE COMMAND...: runs the command that writes results/NAME/FILE, unless it is there
    if [ -e "$out/$1" ]; then
        echo "skipped: $1 is there" >&2
    elif [ -n "$plan" ]; then
        echo "$1"
    else
        local failed=0
        "${@:2}" || failed=$?
        [ "$failed" -eq 0 ] || echo "$1 failed with exit code $failed" >&2
        [ "$code" -ne 0 ] || code=$failed
    fi
}

profile() { # TOOL SCRIPT: keeps the folder of a profile that is complete
    local name
    name=$1_$(basename "$2" .py)
    bash "$root/version2_pytorch_fused/run_$1.sh" --profile-dir "$work/$name" --script "$2" -- --preset small --use-amp || return
    if [ -d "$work/$name" ]; then # the tool is on PATH
        mkdir -p "$out/profiles"
        mv "$work/$name" "$out/profiles/"
    fi
}

export MODELS=v1,v2,v3,v4 PRECISIONS=bf16 REPEATS=${REPEATS:-2}
for run in tiny:100 small:100 medium:40 large:20; do
    cell "peers_${run%:*}_bf16.json" bash "$results/measure_versions.sh" "$1" peers "$run"
done
for run in tiny:100 small:100 medium:40; do
    cell "v1_${run%:*}_profile.json.gz" bash "$results/measure_v1.sh" "$1" "$run"
done
for script in "$root"/version*_*/tiny_llama_v*.py; do
    cell "profiles/rocprofv3_$(basename "$script" .py)" profile rocprofv3 "$script"
done
for tool in rocprof_sys rocprof_compute; do
    cell "profiles/${tool}_$(basename "$script" .py)" profile "$tool" "$script"
done
exit "$code"
