# eight.sh: products of eight texts that add up parts beside each other (branch "eight" in .next/v1), and with the norm inside
# (branch "folded", .next/v2), beside main's in /tmp/tree. About 680 s on one H200.
cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/tc; O=/tmp/out; S=$SECONDS
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
cp -r .next/v1 /tmp/v1; cp -r .next/v2 /tmp/v2
said compile; for n in gate_up down head qkv o; do for t in v1 v2; do for s in 0 1 2; do python3 .next/sweep.py /tmp/$t - $n $s > $O/compile_${t}_${n}_$s.txt 2>&1 & done; done; done; wait
said sweep; python3 .next/sweep.py /tmp/v1 $O/sweep_parts.json >> $O/log.txt 2>> $O/err.txt; python3 .next/sweep.py /tmp/v2 $O/sweep_folded.json >> $O/log.txt 2>> $O/err.txt
said steps; python3 .next/steps.py $O/steps.json >> $O/log.txt 2>> $O/err.txt
said tests; for t in v1 v2; do (cd /tmp/$t; PYTHONPATH=/tmp/site:/tmp/$t timeout 90 python3 -m pytest -q -n 16 -p no:cacheprovider tests/decoding > $O/tests_$t.txt 2>&1; tail -n 3 $O/tests_$t.txt >> $O/log.txt); done
said eight
eight() { # TREE NAME PROMPT
  (cd $1; PYTHONPATH=/tmp/site:$1 python3 decoding/generate.py --preset large --tokens 128 --capture-step --measure-peak --prompt-tokens $3 --batch-size 8 --operations fused --metrics-out $O/$2_$3_$i.json >> $O/eight.txt 2>&1
   python3 -c "import json,sys; d=json.load(open(sys.argv[1])); print(sys.argv[1], d['token_ms'], d['bytes_per_second'])" $O/$2_$3_$i.json >> $O/log.txt); }
for i in 1 2 3; do eight /tmp/tree main 512; for p in 512 1000; do eight /tmp/v1 parts $p; eight /tmp/v2 folded $p; done; done
said fp8; python3 .next/fp8_gap.py >> $O/log.txt 2>> $O/err.txt
said text
for d in synthetic text; do for f in "" --enable-fp8; do
  n=large_$d$f; data=(); [ $d = text ] || data=(--data synthetic)
  nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw.instant,temperature.gpu --format=csv,noheader,nounits -i 0 -lms 500 > $O/clocks_$n.csv & clock=$!
  timeout 150 python3 version4_ultra_fused/tiny_llama_v4.py --preset large --use-amp --num-steps 160 "${data[@]}" $f --metrics-out $O/$n.json >> $O/text.txt 2>&1; kill $clock
  python3 -c "import json,sys; s=json.load(open(sys.argv[1]))['step_ms']; print(sys.argv[1], s['median'], s['p20'], s['p80'])" $O/$n.json >> $O/log.txt 2>&1
done; done
said end
