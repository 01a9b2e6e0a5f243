#!/usr/bin/env bash
# Times every kernel of Version 3 on an AMD GPU, including Triton's, with rocprofv3.
#
#     bash run_rocprof_triton.sh [--profile-dir DIR] [--marker-trace] [--] [ARGUMENTS OF tiny_llama_v3.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprofv3.sh. A Triton kernel has the name of its function in
# kernels/, which begins with the name of its file: _rms_norm_forward. To see the longest kernels:
#
#     python ../version2_pytorch_fused/analyze_kernel_launches.py --trace-file complete_analysis/rocprofv3

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprofv3.sh"
