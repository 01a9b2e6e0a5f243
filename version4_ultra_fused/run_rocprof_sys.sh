#!/usr/bin/env bash
# Records the activity of the host and the AMD GPU over time while Version 4 runs, with rocprof-sys-run.
#
#     bash run_rocprof_sys.sh [--profile-dir DIR] [--] [ARGUMENTS OF tiny_llama_v4.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprof_sys.sh. The host launches a captured step once. With
# --no-capture-step it launches every kernel; compare the two timelines to see what the capture saves.

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprof_sys.sh"
