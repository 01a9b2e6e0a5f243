#!/usr/bin/env bash
# Trains this version at a preset and shows what was measured: bash launch_performance_study.sh tiny; --help says more.
. "$(dirname "$0")/../version1_pytorch_baseline/launch_performance_study.sh"
