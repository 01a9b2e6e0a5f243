
import json, glob, os, statistics
for p in ("tiny", "small", "medium", "large"):
    fs = [json.load(open(f)) for f in sorted(glob.glob(f"{os.environ['OUT']}/turns_{p}_*.json"))]
    if not fs: continue
    base = fs[0]["losses"]["base"]
    for name in fs[0]["ms"]:
        r = [100 * (f["ms"][name] / f["ms"]["base"] - 1) for f in fs if name in f["ms"]]
        d = max(abs(a - b) for a, b in zip(fs[0]["losses"][name], base))
        print(f"{p:6} {name:34} {fs[-1]['ms'].get(name, 0):.4f} ms  " + " ".join(f"{x:+.2f}%" for x in r) + f"   loss {d:.1e}")
