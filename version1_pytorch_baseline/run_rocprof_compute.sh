#!/usr/bin/env bash
# Collects hardware counters and a roofline of Version 1 on an AMD Instinct GPU, with rocprof-compute.
#
#     bash run_rocprof_compute.sh [--profile-dir DIR] [--] [ARGUMENTS OF tiny_llama_v1.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprof_compute.sh.

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprof_compute.sh"
