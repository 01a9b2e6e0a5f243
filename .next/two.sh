# two.sh: on two H200s, about 780 s. Version 4 under DDP and ZeRO-1 before (commit b6a6ef47 in .next/before) and after half a
# block is updated at a time, in turns; FSDP captured at large; the tests that need two GPUs.
cd /tmp/tree; export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc; O=/tmp/out; S=$SECONDS
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
cp -r .next/before /tmp/before
run() { # NAME TREE PROCESSES SCRIPT FLAGS...
  local launch=(python3); [ $3 = 1 ] || launch=(torchrun --standalone --nproc-per-node $3)
  (cd $2; PYTHONPATH=/tmp/site:$2 timeout 120 "${launch[@]}" $4 --use-amp --num-steps 40 --data synthetic "${@:5}" --metrics-out $O/$1.json >> $O/two.txt 2>&1)
  python3 -c "import json,sys; d=json.load(open(sys.argv[1])); s=(d.get('run') or d)['step_ms']; print(sys.argv[1].split('/')[-1], s['median'], s['p20'], s['p80'])" $O/$1.json >> $O/log.txt 2>&1; }
v4=version4_ultra_fused/tiny_llama_v4.py v2=version2_pytorch_fused/tiny_llama_v2.py
said versions
for i in 1 2; do for p in medium large; do for t in tree before; do
  run v4_${p}_${t}_alone_$i /tmp/$t 1 $v4 --preset $p
  for m in ddp zero1; do run v4_${p}_${t}_${m}_$i /tmp/$t 2 $v4 --preset $p --parallel $m; done
done; done; done
said fsdp
cp -r .next/halves /tmp/halves # FSDP that gathers half a block in bf16
for i in 1 2; do for p in medium large; do
  run v2_${p}_alone_$i /tmp/tree 1 $v2 --preset $p --capture-step
  for m in ddp fsdp; do run v2_${p}_${m}_$i /tmp/tree 2 $v2 --preset $p --parallel $m --capture-step; done
  run v2_${p}_halves_$i /tmp/halves 2 $v2 --preset $p --parallel fsdp --capture-step
done; done
said traces
trace() { # NAME SCRIPT FLAGS...
  (cd /tmp/tree; PYTHONPATH=/tmp/site:/tmp/tree timeout 120 torchrun --standalone --nproc-per-node 2 $2 --use-amp --num-steps 12 --data synthetic --capture-step --enable-pytorch-profiler --profile-dir /tmp/trace_$1 "${@:3}" --metrics-out /tmp/trace_$1/run.json >> $O/two.txt 2>&1)
  mkdir -p $O/trace_$1; for f in /tmp/trace_$1/trace*.json; do gzip -9 -c $f > $O/trace_$1/$(basename $f).gz; done; ls -la $O/trace_$1 >> $O/log.txt; }
trace fsdp_medium $v2 --preset medium --parallel fsdp; trace fsdp_large $v2 --preset large --parallel fsdp; trace ddp_large $v4 --preset large --parallel ddp; trace zero1_medium $v4 --preset medium --parallel zero1
said tests; (cd /tmp/halves; PYTHONPATH=/tmp/site:/tmp/halves timeout 100 python3 -m pytest -q -n 3 -p no:cacheprovider tests/common/training/test_distributed.py -k two_gpus > $O/tests_halves.txt 2>&1; tail -n 3 $O/tests_halves.txt >> $O/log.txt)
PYTHONPATH=/tmp/site:/tmp/tree timeout 150 python3 -m pytest -q -n 4 -p no:cacheprovider tests/common/training/test_distributed.py > $O/tests_two.txt 2>&1; tail -n 5 $O/tests_two.txt >> $O/log.txt
said end
