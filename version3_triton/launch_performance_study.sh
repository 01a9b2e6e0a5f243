#!/usr/bin/env bash
# Trains this version at a preset and shows what was measured: bash launch_performance_study.sh tiny; --help says more.
here=$(CDPATH='' cd "$(dirname "$0")" && pwd)
exec bash "$here/../common/launch_performance_study.sh" "$here" "$@"
