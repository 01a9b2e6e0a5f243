import sys, io, re, contextlib
sys.path[:0]=["/work/main","/work/main/.trial"]
import torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
gpu=GPUTarget("cuda",90,32)
driver.set_active(SimpleNamespace(get_current_target=lambda: gpu,get_current_device=lambda: "x",get_current_stream=lambda d:0,map_python_to_cpp_type=str))
triton.knobs.nvidia.dump_ptxas_log=True
triton.knobs.compilation.always_compile=True
import persistent as p
f=torch.zeros(1); b=torch.zeros(1,dtype=torch.bfloat16); i=torch.zeros(1,dtype=torch.int64); n=torch.zeros(1,dtype=torch.int32)
def go(warps=16, chunks=4, CHUNK=256, maxnreg=None, **k):
    k=dict(RQ=16,RO=16,RG=8,RD=16,RH=16,AQ=0,AO=0,AG=0,AD=0,AH=0,TIME=0,DOWN_BLOCK=2048,ASM=True)|k
    out=io.StringIO()
    with contextlib.redirect_stdout(out):
        kern=p._step.warmup(f,f,f,f,f,f,b,i,b,b,b,b,f,f,i,n,i,640,1e-5,0.125,L=22,D=2048,F=5632,V=32000,H=32,K=4,DIM=64,CHUNK=CHUNK,CHUNKS=chunks,BLOCK=2048,grid=(264,),num_warps=warps,maxnreg=maxnreg,**k)
    log=out.getvalue()
    print(warps,k, re.findall(r"Used \d+ registers|\d+ bytes spill \w+",log), "smem",kern.metadata.shared, "v4", len(re.findall(r"ld\.global[^\n]*\.v4",kern.asm["ptx"])), "ld", len(re.findall(r"ld\.global",kern.asm["ptx"])), flush=True)
    return kern
if __name__=="__main__":
    go(TIME=1)
    go(8,RQ=8,RO=8,RG=4,RD=8,RH=8)
