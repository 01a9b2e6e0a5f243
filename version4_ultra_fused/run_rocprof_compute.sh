#!/usr/bin/env bash
# Collects hardware counters and a roofline of Version 4 on an AMD Instinct GPU, with rocprof-compute.
#
#     bash run_rocprof_compute.sh [--profile-dir DIR] [--] [ARGUMENTS OF tiny_llama_v4.py]
#
# Options and results are those of ../version2_pytorch_fused/run_rocprof_compute.sh. The tool counts one kernel at a time, so its
# counters do not depend on the capture. If a release does not count the kernels of a graph, add --no-capture-step: the same
# kernels are then launched one by one.

. "$(dirname "$0")/../version2_pytorch_fused/run_rocprof_compute.sh"
