#!/usr/bin/env bash
# Times every kernel of Version 4 on an AMD GPU, with rocprofv3.
#
#     bash run_rocprofv3.sh [--profile-dir DIR] [--marker-trace] [--] [ARGUMENTS OF tiny_llama_v4.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprofv3.sh. The kernels of a captured step are recorded one by
# one. Spans (--marker-trace) are emitted where the host launches kernels, so the replay of a captured step has none: add
# --no-capture-step to see them. A Triton kernel has the name of its function in kernels/.

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprofv3.sh"
