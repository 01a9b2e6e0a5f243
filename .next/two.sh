# last.sh: what is still to be measured, on two H200s (about 1,400 s).
#   . .whl/install.sh; mkdir -p /tmp/out; cp -r . /tmp/tree; setsid nohup bash /tmp/tree/.next/last.sh > /tmp/out/driver.txt 2>&1 & sleep 545; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out
# Then at once, again and again: for i in $(seq 106); do sleep 5; tar czf $OUT/o.tgz -C /tmp out; grep -q "== end of all" /tmp/out/log.txt && break; done; cat /tmp/out/log.txt
cd /tmp/tree; export PYTHONPATH=/tmp/site:/tmp/tree PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TRITON_CACHE_DIR=/tmp/tc; O=/tmp/out; S=$SECONDS
said() { echo "== $* at $((SECONDS-S)) s" >> $O/log.txt; }
v2=version2_pytorch_fused/tiny_llama_v2.py
cp -r /tmp/tree /tmp/v1; cp -r /tmp/tree /tmp/whole
# Whole blocks in the format of products: one group for both halves of a block.
python3 - <<'P'
import pathlib
path = pathlib.Path("/tmp/whole/common/training/distributed.py"); text = path.read_text()
old = """        for sublayer in (block.self_attn, block.mlp):
            fully_shard(cast(nn.Module, sublayer), mesh=mesh, mp_policy=products)
"""
assert text.count(old) == 1
path.write_text(text.replace(old, "        fully_shard([block.self_attn, block.mlp], mesh=mesh, mp_policy=products)\n"))
P
said tests; timeout 150 python3 -m pytest -q -n 12 --tb=short -p no:cacheprovider tests/common/training/test_distributed.py > $O/tests.txt 2>&1; tail -n 8 $O/tests.txt | cut -c1-300 >> $O/log.txt
said traces
trace() { # NAME SCRIPT FLAGS...
  (cd /tmp/tree; timeout 120 torchrun --standalone --nproc-per-node 2 $2 --use-amp --num-steps 12 --data synthetic --capture-step --enable-pytorch-profiler --profile-dir /tmp/trace_$1 "${@:3}" --metrics-out /tmp/trace_$1/run.json >> $O/two.txt 2>&1)
  mkdir -p $O/trace_$1; for f in /tmp/trace_$1/trace*.json; do gzip -9 -c $f > $O/trace_$1/$(basename $f).gz; done; ls -la $O/trace_$1 >> $O/log.txt; }
trace fsdp_medium $v2 --preset medium --parallel fsdp; trace ddp_medium $v2 --preset medium --parallel ddp; trace fsdp_large $v2 --preset large --parallel fsdp
said fsdp
run() { # NAME TREE PROCESSES SCRIPT FLAGS...
  local launch=(python3); [ $3 = 1 ] || launch=(torchrun --standalone --nproc-per-node $3)
  nvidia-smi --query-gpu=index,clocks.sm,power.draw.instant --format=csv,noheader,nounits -lms 500 > $O/$1.csv & local clock=$!
  (cd $2; PYTHONPATH=/tmp/site:$2 timeout 120 "${launch[@]}" $4 --use-amp --num-steps 40 --data synthetic "${@:5}" --metrics-out $O/$1.json >> $O/two.txt 2>&1); kill $clock
  python3 -c "import json,sys; d=json.load(open(sys.argv[1])); s=(d.get('run') or d)['step_ms']; print(sys.argv[1].split('/')[-1], s['median'], s['p20'], s['p80'])" $O/$1.json >> $O/log.txt 2>&1; }
for i in 1 2 3; do for p in medium large; do
  run v2_${p}_alone_$i /tmp/tree 1 $v2 --preset $p --capture-step
  for m in ddp fsdp; do run v2_${p}_${m}_$i /tmp/tree 2 $v2 --preset $p --parallel $m --capture-step; done
  run v2_${p}_whole_$i /tmp/whole 2 $v2 --preset $p --parallel fsdp --capture-step
done; done
said end of all
