#!/usr/bin/env bash
# Profiles Version 4 with every available profiler, one after the other.
#
#     bash run_all_profilers.sh [--profile-dir DIR] [--enable-rocm-tools] [--] [ARGUMENTS OF tiny_llama_v4.py]
#
# Options and results are those of ../version2_pytorch_fused/run_all_profilers.sh. Every tool sees the kernels of the captured
# step. rocprofv3 and ncu see spans only in the eager steps before the capture, or in every step with --no-capture-step.

. "$(dirname "$0")/../version2_pytorch_fused/run_all_profilers.sh"
