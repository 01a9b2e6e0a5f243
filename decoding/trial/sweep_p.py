"""Forms of the persistent decode step, in turns: ms a token."""
import sys, os, json, statistics, traceback, time, functools
print=functools.partial(print, flush=True)
ROOT=os.environ.get("ROOT", os.getcwd()); sys.path[:0]=[ROOT, ROOT+"/.trial"]
import torch
from decoding import generate
from common.options import Options
from common import device as devices, cli
from persistent import persistent
PROMPT=int(os.environ.get("PROMPT","512")); OUT=os.environ["OUT"]; LIMIT=float(os.environ.get("LIMIT","200"))
T0=time.time()
flags=["--preset","large","--prompt-tokens","512","--operations","fused"]
options=cli.resolve(Options, cli.parse(generate.parser(), flags))
torch.manual_seed(0)
d=generate.Decoder("fused", options, PROMPT+128, torch.bfloat16)
prompt=torch.randint(32000,(PROMPT,)).cuda()
plain=d.one
def reset():
    d.ids.zero_(); d.position.zero_(); d.keys.zero_(); d.values.zero_()
kept=[]; graphs={}; tokens={}; made={}; logits={}
def add(name, one):
    try:
        t=time.time()
        kept.append(one); d.one=one; reset(); d.prefill(prompt)
        pos=d.position.clone(); ids=d.ids.clone()
        lg=one(d.ids[d.position], d.position).float().clone(); torch.cuda.synchronize()
        graphs[name]=devices.capture_graph(d.step)
        reset(); d.prefill(prompt)
        for _ in range(40): graphs[name]()
        torch.cuda.synchronize()
        tokens[name]=d.ids[:PROMPT+40].tolist(); logits[name]=lg
        k=getattr(one,"kernel",None)
        agree=sum(a==b for a,b in zip(tokens[name][PROMPT:],tokens["plain"][PROMPT:])) if "plain" in tokens else 40
        err=(lg-logits["plain"]).abs().max().item() if "plain" in logits else 0
        print(f"{name:40} made in {time.time()-t:.1f} s; same tokens {agree}/40; logits' difference {err:.3g}; registers {getattr(k,'n_regs',None)} spills {getattr(k,'n_spills',None)}")
    except Exception:
        graphs.pop(name,None); print(name, "FAILED", traceback.format_exc().splitlines()[-1][:300])
def time_all(names, turns=3, n=60):
    times={x:[] for x in names}
    for _ in range(turns):
        for x in names:
            g=graphs[x]; d.position.fill_(PROMPT+1)
            for _ in range(5): g()
            s=[torch.cuda.Event(enable_timing=True) for _ in range(n+1)]
            s[0].record()
            for i in range(n): g(); s[i+1].record()
            torch.cuda.synchronize()
            times[x].append(statistics.median(s[i].elapsed_time(s[i+1]) for i in range(n)))
    return {x: statistics.median(t) for x,t in times.items()}
all_times={}
def phases(c):
    one=persistent(d, **(c|{"TIME":5})); add("timed", one)
    rows=[]
    for _ in range(30):
        graphs["timed"](); torch.cuda.synchronize(); rows.append(one.times.view(-1,10)[1:].cpu())
    t=torch.stack(rows).double()  # [30, L-1, 10]: wait qkv, done, wait attn, done, ...
    flat=t.flatten(1); dt=(flat[:,1:]-flat[:,:-1]).median(0).values
    full=torch.cat([dt, dt[:1]*0]).view(-1,10)[:-1].median(0).values/1e3
    names="qkv|arrive+wait|attend|arrive+wait|o|arrive+wait|gate_up|arrive+wait|down|arrive+wait".split("|")
    print("   us: "+", ".join(f"{n} {v:.2f}" for n,v in zip(names,full.tolist())))
def report(names):
    t=time_all([x for x in names if x in graphs]); all_times.update(t)
    for x,v in sorted(t.items(), key=lambda p:p[1]): print(f"   {v:.4f} ms  {x}")
    json.dump(all_times, open(OUT+f"/persistent_{PROMPT}.json","w"), indent=1)
    return t
add("plain", plain)
report(["plain"])
FORMS={
 "132x16": dict(),
 "132x8": dict(warps=8),
 "132x16 half": dict(RQ=8,RO=8,RG=4,RD=8,RH=8),
 "132x8 half": dict(warps=8,RQ=8,RO=8,RG=4,RD=8,RH=8),
 "264x8 half": dict(programs=264,maxnreg=128,warps=8,RQ=8,RO=8,RG=4,RD=8,RH=8,CHUNK=256),
 "264x8 half 128": dict(programs=264,maxnreg=128,warps=8,RQ=8,RO=8,RG=4,RD=8,RH=8,CHUNK=128),
 "264x4 half": dict(programs=264,warps=4,RQ=4,RO=4,RG=2,RD=4,RH=4,CHUNK=128),
 "132x8 quarter": dict(warps=8,RQ=4,RO=4,RG=2,RD=4,RH=4),
 "132x16 asm": dict(ASM=True),
 "132x8 half asm": dict(warps=8,RQ=8,RO=8,RG=4,RD=8,RH=8,ASM=True),
}
for n,c in FORMS.items(): add(n, made.setdefault(n, persistent(d, **c)))
t=report(["plain",*FORMS])
best=min((x for x in t if x!="plain"), key=t.get); base=FORMS[best]
print("best form", best)
for x in ("132x16","132x8 half"): phases(FORMS[x])
per=2560/base.get("programs",132)
scale=132/base.get("programs",132)
current=dict(base)
def s(x): return max(1,int(x*scale))
for key,values in (("AG",(s(4),s(8),s(16),s(32))),("AO",(s(8),s(16),)),("AD",(s(2),s(4),s(8),s(16))),("AQ",(s(4),)),("AH",(s(8),s(16),s(32)))):
    if time.time()-T0>LIMIT: break
    names=[]
    for v in values:
        n=f"{key}={v}"; add(n, persistent(d, **(current|{key:v}))); names.append(n)
    add("now", persistent(d, **current))
    t=report(["now",*names])
    w=min(t,key=t.get)
    if w!="now": current[key]=int(w.split("=")[1])
    for x in names: graphs.pop(x,None)
    print("   chosen", current)
for key,values in (("RG",(4,8,16)),("RD",(8,16,32)),("RQ",(8,16,32)),("RH",(8,16,32)),("DOWN_BLOCK",(1024,2048,4096)),("CHUNK",(128,256,512))):
    if time.time()-T0>LIMIT: break
    names=[]
    for v in values:
        if current.get(key)==v: continue
        n=f"{key}={v}"; add(n, persistent(d, **(current|{key:v}))); names.append(n)
    add("now", persistent(d, **current))
    t=report(["now",*names])
    w=min(t,key=t.get)
    if w!="now": current[key]=int(w.split("=")[1])
    print("   chosen", current)
phases(current)
add("now", persistent(d, **current)); add("plain",plain)
report(["plain","now"])
json.dump(current, open(OUT+f"/persistent_choice_{PROMPT}.json","w"))
