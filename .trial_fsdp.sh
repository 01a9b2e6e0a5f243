export NCCL_NVLS_ENABLE=0
O=$1; V2=version2_pytorch_fused/tiny_llama_v2.py
python3 -m pytest -q -m gpu -k two_gpus tests/common/training/test_distributed.py -p no:cacheprovider --no-header 2>&1 | tail -8
run() { name=$1; shift; timeout 90 "$@" --metrics-out $O/$name.json > $O/$name.txt 2>&1 || tail -5 $O/$name.txt; grep -E "step time|peak mem|loss  " $O/$name.txt | sed "s/^/$name /"; }
T="torchrun --standalone --nproc-per-node 2"
for p in medium:30 large:12; do s=${p%:*}; n=${p#*:}; F="--preset $s --use-amp --num-steps $n --data synthetic"
  CUDA_VISIBLE_DEVICES=0 run alone0_$s python3 $V2 $F --capture-step & CUDA_VISIBLE_DEVICES=1 run alone1_$s python3 $V2 $F --capture-step & wait
  run fsdp_eager_$s $T $V2 $F --parallel fsdp --no-capture-step
  run fsdp_captured_$s $T $V2 $F --parallel fsdp --capture-step
  run ddp_captured_$s $T $V2 $F --parallel ddp --capture-step
done
