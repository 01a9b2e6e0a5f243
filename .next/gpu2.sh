cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc
O=/tmp/out; N=/tmp/tree/.next; S=$SECONDS; suite="python3 version2_pytorch_fused/benchmark_suite.py --use-amp --batch-sizes preset --seq-lengths preset"
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
study() { # NAME ARGUMENTS...
  $suite --output-dir /tmp/s_$1 "${@:2}" >> $O/studies.txt 2>&1; cp /tmp/s_$1/benchmark.json $O/$1.json; }
said micro
for n in qkv o gate_up down head; do python3 $N/batch_products.py /tmp/w_$n.json $n > /tmp/w_$n.txt 2>&1 & done; wait
said clean; python3 $N/batch_products.py $O/batch_products.json > $O/batch_products.txt 2>&1; cat $O/batch_products.txt >> $O/log.txt
said tests
PYTHONPATH=$PYTHONPATH:$N timeout -s INT 200 python3 -m pytest -q -n 16 -p now -p no:cacheprovider --no-header --tb=short --durations 10 --dist worksteal @$N/ids.txt > $O/tests.txt 2>&1
tail -3 $O/tests.txt >> $O/log.txt
said trace; for p in small tiny; do python3 version4_ultra_fused/tiny_llama_v4.py --preset $p --use-amp --deterministic --num-steps 12 --profile-dir /tmp/tr_$p --metrics-out /tmp/tr_$p.json >> $O/studies.txt 2>&1; gzip -9 -n -c /tmp/tr_$p/trace_*.json > $O/v4_$p.json.gz; done
said decoding
d() { (cd decoding; python3 generate.py --preset large --tokens 128 --capture-step --measure-peak --prompt-tokens $1 --batch-size $2 --operations $3 --metrics-out $O/$4.json) >> $O/decoding.txt 2>&1; grep "decode " $O/decoding.txt | tail -1 >> $O/log.txt; }
d 512 8 fused large_fused_captured_8_1; d 1000 8 fused large_fused_captured_8_1000_1; d 512 8 v3 large_v3_captured_8; d 512 8 v2 large_v2_captured_8
d 512 8 fused large_fused_captured_8_2; d 1000 8 fused large_fused_captured_8_1000_2;d 512 8 fused large_fused_captured_8_3; d 1000 8 fused large_fused_captured_8_1000_3
said fp8; python3 $N/time.py medium,large --enable-fp8 >> $O/log.txt 2>> $O/err.txt
said stages; python3 -m pytest -q -p no:cacheprovider tests/version3_triton/performance_debugging/test_stages.py -k on_a_gpu >> $O/stages.txt 2>&1; tail -3 $O/stages.txt >> $O/log.txt
said formats; for p in tiny small; do study formats_${p}_bf16 --preset $p --metrics throughput,memory --models v4,v4-fp8 --repeats 3 --num-steps 100; done
said end
