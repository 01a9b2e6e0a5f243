# gpu_next.sh: what is still to be measured, on one H200 (about 1,600 s), in a session of its own, so a study may outlast a call:
#   . .whl/install.sh; mkdir -p /tmp/out; cp -r . /tmp/tree; setsid nohup bash /tmp/tree/.next/gpu_next.sh > /tmp/out/driver.txt 2>&1 &
#   sleep 560; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out
# Then three times at once, each the moment the one before has answered: sleep 570; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out
# Before: mkdir .next/ahead; git archive a3162ee3 | tar x -C .next/ahead
# A machine that has been idle for 30 s is gone, with what it had measured: write and think before or after, not between two calls.
cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc
O=/tmp/out; S=$SECONDS; suite="python3 version2_pytorch_fused/benchmark_suite.py --use-amp --batch-sizes preset --seq-lengths preset"
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
study() { # NAME ARGUMENTS...
  $suite --output-dir /tmp/s_$1 "${@:2}" >> $O/studies.txt 2>&1; cp /tmp/s_$1/benchmark.json $O/$1.json; }
said ahead; cp -r .next/ahead /tmp/ahead; bash /tmp/ahead/.next/ahead.sh
said tests; timeout 60 python3 -m pytest -q -n 16 -p no:cacheprovider tests/decoding tests/tracepage/readers/test_pytorch.py tests/studies/test_profiled_runs.py > $O/tests.txt 2>&1; tail -n 3 $O/tests.txt >> $O/log.txt
said small; PRECISIONS=bf16 bash results/measure_versions.sh session versions small:100 >> $O/studies.txt 2>&1; cp results/session/* $O/
said processes; study processes_tiny_bf16 --preset tiny --models v4,v4-no-early-update --metrics throughput,memory --num-steps 300 --repeats 6
said formats; for p in tiny small; do study formats_${p}_bf16 --preset $p --metrics throughput,memory --models v4,v4-fp8 --repeats 3 --num-steps 100; done
said levers
study levers_small_bf16 --preset small --metrics throughput,memory --models v3-no-fused-adamw-captured,v3-captured,v4-no-memory-plan,v4-no-early-update,v4-no-side-stream,v4-fp32-residual-gradient,v4 --repeats 3 --num-steps 100
said end
