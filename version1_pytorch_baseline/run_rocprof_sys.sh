#!/usr/bin/env bash
# Records the activity of the host and the AMD GPU over time while Version 1 runs, with rocprof-sys-run.
#
#     bash run_rocprof_sys.sh [--profile-dir DIR] [--] [ARGUMENTS OF tiny_llama_v1.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprof_sys.sh.

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprof_sys.sh"
