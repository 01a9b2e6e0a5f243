# final.sh ROOT OUT: the tree ROOT (new) beside /tmp/old (main of the morning), on two GPUs.
N=$1; O=$2; mkdir -p $O; B=/tmp/site; export TRITON_CACHE_DIR=/tmp/tc
t() { (cd $1; PYTHONPATH=$B:$1 timeout 60 python3 $N/.trial/time.py "${@:2}" 2>>$O/err.txt | tail -1); }
S=$SECONDS
( export CUDA_VISIBLE_DEVICES=0; for n in 1 2 3; do for k in old new; do [ $k = old ] && d=/tmp/old || d=$N; echo "$k $(t $d tiny,small)" >> $O/short.txt; done; done ) &
( export CUDA_VISIBLE_DEVICES=1; for n in 1 2 3; do for k in old new; do [ $k = old ] && d=/tmp/old || d=$N; echo "$k $(t $d medium)" >> $O/medium.txt; done; done ) &
wait; cat $O/short.txt $O/medium.txt; echo "times: $((SECONDS-S)) s"; tar czf $OUT/o.tgz -C $(dirname $O) $(basename $O)
c() { (cd $2; CUDA_VISIBLE_DEVICES=$5 PYTHONPATH=$B:$2 timeout 110 python3 version4_ultra_fused/tiny_llama_v4.py --preset large --use-amp --enable-fp8 --num-steps 150 --seed $3 --log-every 150 --metrics-out $O/$1_$3.json > $O/$1_$3.txt 2>&1 || tail -3 $O/$1_$3.txt); }
for s in 0 1 2; do c before /tmp/old $s x 1 & c after $N $s x 0 & done
(cd $N; CUDA_VISIBLE_DEVICES=0 PYTHONPATH=$B:$N timeout 115 python3 -m pytest -q -n 8 -p no:cacheprovider --no-header --tb=short tests/version4_ultra_fused tests/common/training/test_capture.py --deselect tests/version4_ultra_fused/test_compiled_kernels.py > $O/tests.txt 2>&1; tail -12 $O/tests.txt) &
wait; echo "tests and curves: $((SECONDS-S)) s"
python3 - $O <<'P'
import json, sys, glob, statistics as st
for k in ("before", "after"):
    for s in (0, 1, 2):
        try: r = json.load(open(f"{sys.argv[1]}/{k}_{s}.json"))
        except OSError as e: print(k, s, e); continue
        l = r["loss"]["all"]; print(k, s, len(l), "last 50:", round(sum(l[-50:]) / 50, 4), "first", round(l[0], 4), "ms", round(min(r["step_ms"]["all"]), 2), r.get("fp8"))
P
tar czf $OUT/o.tgz -C $(dirname $O) $(basename $O)
(cd $N; NCCL_NVLS_ENABLE=0 PYTHONPATH=$B:$N timeout 60 python3 -m pytest -q -m gpu -k two_gpus tests/common/training/test_distributed.py -p no:cacheprovider --no-header 2>&1 | tail -2)
