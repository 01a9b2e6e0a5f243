"""python account.py TRACE PRESET: main chain of the last captured steps by kind, with bounds."""
import gzip,json,sys,re,statistics
from collections import defaultdict
f,preset=sys.argv[1:3]; verbose=len(sys.argv)>3
N=1024
D,L,H,K,F,V={'tiny':(256,4,8,8,512,1000),'small':(512,8,8,4,2048,1000)}[preset]
Dh=D//H; C=(H+2*K)*Dh
HBM,FL=4.8e6,989e6 # bytes/us, flop/us
prod=lambda m,n,k:(2*m*n*k, 2*(m*k+k*n+m*n))
B={'fwd qkv':prod(N,C,D),'fwd o':prod(N,D,D),'fwd gate_up':(2*N*2*F*D,2*(N*D+2*F*D+3*N*F)),'fwd down':prod(N,D,F),'fwd logits':prod(N,V,D),
'fwd attention':(4*8*H*128*128*Dh//2, 2*N*C+2*N*D),'attention backward':(10*8*H*128*128*Dh//2,2*(2*N*C+2*N*D)),
'fwd norm':(0,N*D*(4+2+4+2+2)),'swiglu backward':(0,5*2*N*F),'dgrad down':prod(N,F,D),'dgrad gate_up':prod(N,D,2*F),
'dgrad o':prod(N,D,D),'dgrad qkv':prod(N,D,C),'dgrad head':prod(N,D,V),'norm backward':(0,4*2*N*D),'loss':(0,4*N*V),'loss mean':(0,8*N),
'embed':(0,8*N*D),'embedding backward':(0,N*D*4+8*V*D),'adamw head':(0,30*V*D),
'adamw block':(0,28*(D*C+D*D+3*D*F)),'wgrad':None}
t=json.load(gzip.open(f)); ev=t['traceEvents']
ks=sorted((e for e in ev if e.get('cat') in('kernel','gpu_memset','gpu_memcpy')),key=lambda e:e['ts'])
g=defaultdict(list)
for e in ks: g[e['args']['correlation']].append(e)
steps=[v for v in g.values() if len(v)>30]; steps=steps[1:] or steps
def kinds(st):
    names=[e['name'] for e in st]; out=[]; fwd=True; i=0
    fseq=['fwd o','fwd down']*L+['fwd logits']; 
    bseq=['dgrad head']+[]; seen_loss=False; nfwd=0; phase=None; nb=0; fm=0
    for e in st:
        n=e['name']; k='other'
        if 'Memcpy' in n or 'arange' in n or 'radix' in n: k='side: sort'
        elif '_rms_norm_dweight' in n: k='side: norm weights'
        elif 'CUDAFunctorOnSelf' in n: k='side: step count'
        elif '_adamw' in n: k='adamw head' if e is st[-1] else 'side: adamw block'
        elif '_embedding_backward' in n: k='embedding backward'
        elif 'gather' in n: k='embed'
        elif 'norm_forward' in n: k='fwd norm'
        elif n=='_matmul': k=['fwd qkv','fwd gate_up'][fm%2]; fm+=1
        elif 'flash_attention_forward' in n: k='fwd attention'
        elif '_cross_entropy_mean' in n: k='loss mean'
        elif '_cross_entropy' in n: k='loss'; seen_loss=True
        elif '_matmul_swiglu_backward' in n: k='dgrad down'; phase='ffn2'
        elif '_swiglu_backward' in n: k='swiglu backward'; phase='ffn2'
        elif '_short_attention_backward' in n: k='attention backward'
        elif '_matmul_norm_backward' in n: k='dgrad gate_up' if phase=='ffn2' else 'dgrad qkv'; phase='attn' if phase=='ffn2' else 'ffn'
        elif '_rms_norm_backward' in n:
            k='norm backward'; phase={'head':'ffn','ffn3':'attn'}[phase]
        elif 'nvjet' in n:
            if not seen_loss: k=fseq[nfwd]; nfwd+=1
            elif re.search('NT[NT]$',n): k='side: wgrad'
            else:
                if phase is None: k='dgrad head'; phase='head'
                elif phase=='ffn': k='dgrad down'
                elif phase=='ffn2': k='dgrad gate_up'; phase='ffn3'
                elif phase=='attn': k='dgrad o'
        out.append(k)
    return out
tot=defaultdict(list); gaps=defaultdict(list); spans=[]; cnt={}
beside=defaultdict(list)
for st in steps:
    kk=kinds(st); t0=st[0]['ts']; end=max(e['ts']+e['dur'] for e in st); spans.append(end-t0)
    s=defaultdict(float); gp=defaultdict(float); c=defaultdict(int); last=t0; prev=None; bs=defaultdict(float)
    side=[(e['ts'],e['ts']+e['dur'],k) for e,k in zip(st,kk) if k.startswith('side')]
    for e,k in zip(st,kk):
        if k.startswith('side'):
            s[k]+=e['dur'];c[k]+=1;continue
        a,b=max(e['ts'],last),e['ts']+e['dur']
        gap=max(0,e['ts']-last)
        if verbose and st is steps[-1]: print(f"{e['ts']-t0:8.2f} gap {e['ts']-last:6.2f} {k:20s} {e['dur']:6.2f}  beside: {sorted({q for x,y,q in side if x<b and y>e['ts']})}")
        s[k]+=b-a; c[k]+=1; gp[f'gap before {k}']+=gap; last=max(last,b)
    s['tail']=end-last
    for k in s: tot[k].append(s[k])
    for k in gp: gaps[k].append(gp[k])
    cnt=c
med=statistics.median
print(f, 'step',[round(x,1) for x in spans])
rows=[]
T=med(spans)
for k in tot:
    fl,by=B.get(k.replace('side: ',''),None) or (0,0)
    n=cnt.get(k,1); bound=max(fl/FL,by/HBM)*n
    gp=med(gaps.get('gap before '+k,[0]))
    rows.append((k,n,med(tot[k]),gp,bound))
for r in sorted(rows,key=lambda r:-(r[2]+r[3])):
    print(f"{r[0]:22s} n {r[1]:3d} time {r[2]:7.1f} ({r[2]/r[1]:5.2f} each) gaps {r[3]:5.1f}  {100*(r[2]+r[3])/T if not r[0].startswith('side') else 0:5.1f}%  bound {r[4]:6.1f}")
main=[r for r in rows if not r[0].startswith('side')]
print('main time',sum(r[2] for r in main),'gaps',sum(r[3] for r in main),'bounds',sum(r[4] for r in main))
