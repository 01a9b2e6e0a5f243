"""Variants of prefetching in the decode step, in turns in one process: ms a token."""
import sys, os, json, statistics, itertools
sys.path[:0]=[os.getcwd(), os.getcwd()+"/.whl"]
import torch
import decoding, decoding.decode_kernels
import dk
sys.modules["decoding.decode_kernels"]=dk; decoding.decode_kernels=dk
from decoding import generate
from common.options import Options
from common import device as devices
from common import config as configs
from dataclasses import replace
import argparse
MB=1<<20
model=configs.resolve("large").model
sys.argv=["x","--preset","large","--prompt-tokens","512","--operations","fused"]
from common import cli
options=cli.resolve(Options, cli.parse(generate.parser()))
torch.manual_seed(0)
PROMPT=int(os.environ.get("PROMPT","512"))
d=generate.Decoder("fused", options, PROMPT+128, torch.bfloat16)
prompt=torch.randint(model.vocab_size,(PROMPT,)).cuda()
variants={"none":{}}
def add(name, **k): variants[name]=k
for o in (8,):
  add("o", attend_o=o*MB)
for g in (4,8,16): add(f"o+gate{g}", attend_o=8*MB, attend_gate=g*MB)
for early in (0,1):
  for p in (1,2,4,8):
    add(f"prod{p}{'e' if early else ''}", o=p*MB, gate_up=p*MB, down=p*MB, early=early)
    add(f"o+g4+prod{p}{'e' if early else ''}", attend_o=8*MB, attend_gate=4*MB, o=p*MB, gate_up=p*MB, down=p*MB, early=early)
    add(f"o+g8+gd{p}{'e' if early else ''}", attend_o=8*MB, attend_gate=8*MB, gate_up=p*MB, down=p*MB, early=early)
  add(f"qkvO+g8{early}", qkv=8*MB, attend_gate=8*MB, early=early)
  add(f"qkvO+g8+gd2{early}", qkv=8*MB, attend_gate=8*MB, gate_up=2*MB, down=2*MB, early=early)
graphs={}; tokens={}
def reset():
    d.ids.zero_(); d.position.zero_(); d.keys.zero_(); d.values.zero_()
for name,k in variants.items():
    k=dict(k); dk.EARLY=bool(k.pop("early",0)); dk.AHEAD=k
    reset(); d.prefill(prompt)
    graphs[name]=devices.capture_graph(d.step)
    reset(); d.prefill(prompt)
    for _ in range(40): graphs[name]()
    tokens[name]=d.ids[:PROMPT+40].tolist()
times={n:[] for n in graphs}
for turn in range(6):
    for name,g in graphs.items():
        d.position.fill_(PROMPT+1)
        for _ in range(5): g()
        s=[torch.cuda.Event(enable_timing=True) for _ in range(101)]
        s[0].record()
        for i in range(100): g(); s[i+1].record()
        torch.cuda.synchronize()
        times[name].append(statistics.median(s[i].elapsed_time(s[i+1]) for i in range(100)))
base=statistics.median(times["none"])
rows=sorted(((statistics.median(t),n) for n,t in times.items()))
for t,n in rows: print(f"{n:18} {t:.4f} ms  {t/base:.4f}  same tokens {tokens[n]==tokens['none']}")
json.dump({"times":times,"gpu":torch.cuda.get_device_name()},open(os.environ.get("RES","/tmp/res")+f"/decode_prefetch_{PROMPT}.json","w"))
