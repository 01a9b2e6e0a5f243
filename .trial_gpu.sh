#!/bin/bash
# From the root of the tree: OUT=folder bash .trial_gpu.sh [stages]
#   checks   tests, correctness and four loss curves, all at once (nothing is timed); about 110 s
#   kernels  each kernel alone, large and medium; about 45 s
#   times    steps of all variants in turns, three processes a size; about 170 s
export OUT=${OUT:-/tmp/trial}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
part() { # name, seconds, command: its output goes to a file, and is printed at its end
  local name=$1 limit=$2 begin=$SECONDS; shift 2
  timeout "$limit" "$@" > "$OUT/$name.txt" 2> "$OUT/$name.err"
  local code=$?
  echo "== $name: exit code $code, $((SECONDS - begin)) s"
  [ $code = 0 ] || { tail -5 "$OUT/$name.txt"; grep -v '^ ' "$OUT/$name.err" | tail -5; }
}
curve() { # name, seed, trials
  local name=curve_$1 seed=$2; shift 2
  part $name 200 env "$@" python version4_ultra_fused/tiny_llama_v4.py --preset large --use-amp --num-steps 150 --seed $seed --enable-fp8 --log-every 150 --metrics-out "$OUT/$name.json"
}
for stage in ${*:-checks kernels times}; do
  case $stage in
    checks)
      part tests 200 python -m pytest tests/version4_ultra_fused/kernels/test_fp8.py -k trial -q --no-header --tb=line -p no:cacheprovider &
      part correct 200 python .trial_gpu.py correct &
      curve as_is_0 0 TRIAL_HEAD=0 &
      curve head_0 0 TRIAL_HEAD=2 &
      curve head_1 1 TRIAL_HEAD=2 &
      curve all_0 0 TRIAL_HEAD=2 TRIAL_NORM=1 TRIAL_ROTATE=1 TRIAL_WEIGHTS=1 &
      wait
      grep -E "passed|failed|Error" "$OUT/tests.txt" | tail -8
      cat "$OUT/correct.txt"
      python .trial_gpu.py curves ;;
    kernels)
      for size in large medium; do part kernels_$size 60 python .trial_gpu.py kernels $size; cat "$OUT/kernels_$size.txt"; done ;;
    times)
      for n in 1 2 3; do for size in large medium; do part run_${size}_$n 80 python .trial_gpu.py times $size $n; grep -A4 FAILED "$OUT/run_${size}_$n.txt"; done; done
      python .trial_gpu.py table | tee "$OUT/table.txt" ;;
  esac
done
echo "== done, $SECONDS s"
