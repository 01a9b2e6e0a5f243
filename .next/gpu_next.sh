# gpu_next.sh: what is still to be measured, on two H200s (about 1,500 s), or on one without its last part (about 680 s).
#   . .whl/install.sh; mkdir -p /tmp/out; cp -r . /tmp/tree; setsid nohup bash /tmp/tree/.next/gpu_next.sh > /tmp/out/driver.txt 2>&1 & sleep 545; cat /tmp/out/log.txt; tar czf $OUT/o.tgz -C /tmp out
# Then at once, again and again: for i in $(seq 110); do sleep 5; tar czf $OUT/o.tgz -C /tmp out; grep -q "== end of all" /tmp/out/log.txt && break; done; cat /tmp/out/log.txt
# Before: bash .next/prepare.sh b77db51e 2b066616 6da0fcaa; .whl with install.sh; carry .whl and .next.
# A machine that has been idle for 30 s is gone, with what it had measured: write and think before or after, not between two calls.
cd /tmp/tree; . .next/eight.sh
[ "$(nvidia-smi -L | wc -l)" -lt 2 ] || . .next/two.sh
echo "== end of all" >> /tmp/out/log.txt
