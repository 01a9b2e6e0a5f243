#!/usr/bin/env bash
# Times every kernel of Version 1 on an AMD GPU, with rocprofv3.
#
#     bash run_rocprofv3.sh [--profile-dir DIR] [--marker-trace] [--] [ARGUMENTS OF tiny_llama_v1.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprofv3.sh.

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprofv3.sh"
