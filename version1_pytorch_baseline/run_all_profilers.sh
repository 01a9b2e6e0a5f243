#!/usr/bin/env bash
# Profiles Version 1 with every available profiler, one after the other: PyTorch's, DeepSpeed's where it is installed, and on
# request those of the GPU's vendor.
#
#     bash run_all_profilers.sh [--profile-dir DIR] [--enable-rocm-tools] [--] [ARGUMENTS OF tiny_llama_v1.py]
#
# Options and results are those of ../version2_pytorch_fused/run_all_profilers.sh.

. "$(dirname "$0")/../version2_pytorch_fused/run_all_profilers.sh"
