cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc
O=/tmp/out; N=/tmp/tree/.next; S=$SECONDS
said() { echo "== $* at $((SECONDS-S)) s" | tee -a $O/log.txt; }
said micro
for n in qkv o gate_up down head; do python3 $N/batch_products.py /tmp/w_$n.json $n > $O/w_$n.txt 2>&1 & done; wait
said clean; python3 $N/batch_products.py $O/batch_products.json 2>&1 | tee -a $O/log.txt; cp decoding/decode_kernels.py $O/
said decoding
d() { (cd decoding; python3 generate.py --preset large --tokens 128 --capture-step --measure-peak --prompt-tokens $1 --batch-size $2 --operations $3 --metrics-out $O/$4.json) >> $O/decoding.txt 2>&1; echo $4 $(grep "decode " $O/decoding.txt | tail -1) | tee -a $O/log.txt; }
for n in 1 2 3; do d 512 8 fused large_fused_captured_8_$n; d 1000 8 fused large_fused_captured_8_1000_$n; done
said tests
PYTHONPATH=$PYTHONPATH:$N timeout -s INT 130 python3 -m pytest -q -n 16 -p now -p no:cacheprovider --no-header --tb=short --durations 10 --dist worksteal @$N/ids.txt > $O/tests.txt 2>&1
tail -n 3 $O/tests.txt | tee -a $O/log.txt
said trace; for p in small tiny; do python3 version4_ultra_fused/tiny_llama_v4.py --preset $p --use-amp --deterministic --num-steps 12 --profile-dir /tmp/tr_$p --metrics-out /tmp/tr_$p.json >> $O/studies.txt 2>&1; gzip -9 -n -c /tmp/tr_$p/trace_*.json > $O/v4_$p.json.gz; done
for v in v2 v1 v3; do d 512 8 $v large_${v}_captured_8; done
said fp8; python3 $N/time.py medium,large --enable-fp8 2>> $O/err.txt | tee -a $O/log.txt
said stages; python3 -m pytest -q -p no:cacheprovider tests/version3_triton/performance_debugging/test_stages.py -k on_a_gpu >> $O/stages.txt 2>&1; tail -n 3 $O/stages.txt | tee -a $O/log.txt
said end
