# prepare.sh EIGHT FOLDED HALVES: puts the trees that gpu_next.sh compares beside it: the commits of three trials, and that before
# half a block was updated at a time.
set -eu
parts="common decoding tracepage version1_pytorch_baseline version2_pytorch_fused version3_triton version4_ultra_fused studies tests pyproject.toml exercise_tools.py page.py"
for tree in "v1 $1" "v2 $2" "halves $3" "before b6a6ef47"; do
  set -- $tree; rm -rf ".next/$1"; mkdir -p ".next/$1"; git archive "$2" $parts | tar x -C ".next/$1"; rm -rf ".next/$1/tests/fixtures"
done
# In both trials gcd(0, size) was size, so a tile that fetches nothing ahead asked for whole rows.
sed -i 's/AHEAD=math.gcd(ahead, size)/AHEAD=ahead if ahead <= size else 0/' .next/v1/decoding/decode_kernels.py .next/v2/decoding/decode_kernels.py
