# last.sh: what is still to be measured, on two H200s (about 1,400 s).
#   . .whl/install.sh; mkdir -p /tmp/out; cp -r . /tmp/tree; setsid nohup bash /tmp/tree/.next/last.sh > /tmp/out/driver.txt 2>&1 & sleep 545; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out
# Then at once, again and again: for i in $(seq 106); do sleep 5; tar czf $OUT/o.tgz -C /tmp out; grep -q "== end of all" /tmp/out/log.txt && break; done; cat /tmp/out/log.txt
cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc; O=/tmp/out; S=$SECONDS
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
v2=version2_pytorch_fused/tiny_llama_v2.py
cp -r /tmp/tree /tmp/v1; cp -r /tmp/tree /tmp/whole
said attention; python3 .next/attend.py $O/attend.json >> $O/log.txt 2>> $O/err.txt
said eight
eight() { # TREE NAME PROMPT
  (cd $1; PYTHONPATH=/tmp/site:$1 python3 decoding/generate.py --preset large --tokens 128 --capture-step --measure-peak --prompt-tokens $3 --batch-size 8 --operations fused --metrics-out $O/$2_$3_$i.json >> $O/eight.txt 2>&1
   python3 -c "import json,sys; d=json.load(open(sys.argv[1])); print(sys.argv[1], d['token_ms'], d['bytes_per_second'])" $O/$2_$3_$i.json >> $O/log.txt); }
[ ! -f /tmp/v1/chosen ] || for i in 1 2 3; do for p in 512 1000; do eight /tmp/tree main $p; eight /tmp/v1 chunk $p; done; done
said tests; timeout 200 python3 -m pytest -q -n 8 -p no:cacheprovider tests/common/training tests/decoding tests/version2_pytorch_fused tests/common/test_cli.py tests/end_to_end/test_nothing_lost.py > $O/tests.txt 2>&1; tail -n 12 $O/tests.txt >> $O/log.txt
said end of all
