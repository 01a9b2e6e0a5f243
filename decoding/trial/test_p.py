import os, sys
os.environ["TRITON_INTERPRET"]="1"
sys.path[:0]=["/work/main","/work/main/.trial"]
import tests.decoding.test_generate as t, torch, pathlib, tempfile
from persistent import persistent
from version1_pytorch_baseline import tiny_llama_v1
p=pathlib.Path(tempfile.mkdtemp())/"s.yaml"; p.write_text(t.SIZES)
made=t.decoder("fused", torch.float32, p)
step=persistent(made, programs=1, warps=4, ASM=False, CHUNK=32, RQ=4,RO=4,RG=4,RD=4,RH=4)
made.one=lambda *a: step(*a).clone()
got=t.logits_of(made, 6)
text=made.ids[:len(t.PROMPT)+1+6]
whole=tiny_llama_v1.TinyLlama(t.generate.ModelConfig(**made.config.model_dump()))
whole.load_state_dict(made.model.baseline_state_dict())
e=whole(text[None,:-1])[0,4:]
print((got-e).abs().max(), text.tolist(), e.argmax(-1).tolist())
