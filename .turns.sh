# SIZES...: two processes each
export TRITON_CACHE_DIR=/tmp/v4_trials_triton PYTHONPATH=$PWD:$PYTHONPATH
for p in $*; do for n in 1 2; do python3 .turns.py $p $n 2>&1 | grep -v Warn; done; done
