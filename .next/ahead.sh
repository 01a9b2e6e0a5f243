# ahead.sh: does the L2 fetch the weights of eight texts while a kernel waits? From this branch's tree in /tmp/ahead; about 70 s.
cd /tmp/ahead; export PYTHONPATH=/tmp/site:/tmp/ahead PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/ta; O=/tmp/out
for n in qkv o gate_up down head; do python3 .next/ahead.py /tmp/a_$n.json $n > $O/a_$n.txt 2>&1 & done; wait
python3 .next/ahead.py $O/ahead.json >> $O/log.txt 2>> $O/ahead_err.txt
