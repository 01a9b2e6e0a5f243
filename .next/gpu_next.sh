# gpu_next.sh: all of a session's GPU work in turns, on one H200 (about 1,600 s). Start it once, in a session of its own:
#   . .whl/install.sh; mkdir -p /tmp/out; cp -r . /tmp/tree; setsid nohup bash /tmp/tree/.next/gpu_next.sh > /tmp/out/driver.txt 2>&1 &
#   sleep 500; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out
# and then call `sleep 540; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out` within 30 s of each answer. JSON and logs: /tmp/out.
# To stop a part: kill by its number (ps -eo pid,pgid,cmd), never pkill -f, which finds the shell of the call, too.
cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc PRECISIONS=bf16
O=/tmp/out; N=/tmp/tree/.next; S=$SECONDS; suite="python3 version2_pytorch_fused/benchmark_suite.py --use-amp --batch-sizes preset --seq-lengths preset"
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
study() { # NAME ARGUMENTS...
  $suite --output-dir /tmp/s_$1 "${@:2}" >> $O/studies.txt 2>&1; cp /tmp/s_$1/benchmark.json $O/$1.json; }
said tests
PYTHONPATH=$PYTHONPATH:$N timeout -s INT 240 python3 -m pytest -q -n 16 -p now -p no:cacheprovider --no-header --tb=short -m "not slow and not browser" --durations 15 --dist worksteal > $O/tests.txt 2>&1
tail -3 $O/tests.txt >> $O/log.txt
said fp8; PYTHONPATH=/tmp/site:/tmp/tree python3 $N/time.py medium,large --enable-fp8 >> $O/log.txt 2>> $O/err.txt
said "tiles of decoding"; python3 $N/batch_tiles.py $O/batch_tiles.json > $O/batch_tiles.txt 2>&1; tail -14 $O/batch_tiles.txt >> $O/log.txt
said small; bash results/measure_versions.sh session versions small:100 >> $O/studies.txt 2>&1; cp results/session/* $O/
said levers small
study levers_small_bf16 --preset small --metrics throughput,memory --models v3-no-fused-adamw-captured,v3-captured,v4-no-memory-plan,v4-no-early-update,v4-no-side-stream,v4-fp32-residual-gradient,v4 --repeats 3 --num-steps 100
said trace; for p in small tiny; do python3 version4_ultra_fused/tiny_llama_v4.py --preset $p --use-amp --deterministic --num-steps 12 --profile-dir /tmp/tr_$p --metrics-out /tmp/tr_$p.json >> $O/studies.txt 2>&1; gzip -9 -n -c /tmp/tr_$p/trace_*.json > $O/v4_$p.json.gz; done
said decoding
d() { (cd decoding; python3 generate.py --preset large --tokens 128 --capture-step --measure-peak --prompt-tokens $1 --batch-size $2 --operations $3 --metrics-out $O/$4.json) >> $O/decoding.txt 2>&1; }
for n in 1 2 3; do d 512 8 fused large_fused_captured_8_$n; d 1000 8 fused large_fused_captured_8_1000_$n; d 512 1 fused large_fused_captured_$n; done
for v in v1 v2 v3; do d 512 8 $v large_${v}_captured_8; done
grep -h "decode " $O/decoding.txt >> $O/log.txt
said formats; for p in tiny small; do study formats_${p}_bf16 --preset $p --metrics throughput,memory --models v4,v4-fp8 --repeats 3 --num-steps 100; done
said processes; study processes_tiny_bf16 --preset tiny --models v4,v4-no-early-update --metrics throughput,memory --num-steps 300 --repeats 6
said end
