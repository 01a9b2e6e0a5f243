"""A decode step as one kernel that stays on the GPU (trial)."""
import torch, triton, triton.language as tl
from version3_triton.kernels.memory import read
INTERPRETED = triton.knobs.runtime.interpret

@triton.jit
def _mark(times_ptr, program, place, TIME: tl.constexpr):
    if TIME:
        if program == TIME - 1:
            tl.store(times_ptr + place, tl.extra.cuda.globaltimer())

@triton.jit
def _arrive(count_ptr):
    """This program's stores so far can be seen by those that wait."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")

@triton.jit
def _wait(count_ptr, target, ASM: tl.constexpr):
    """Until so many have arrived."""
    if ASM:
        seen = tl.inline_asm_elementwise("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [count_ptr], dtype=tl.int32, is_pure=False, pack=1)
        while seen < target:
            seen = tl.inline_asm_elementwise("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [count_ptr], dtype=tl.int32, is_pure=False, pack=1)
    else:
        seen = tl.atomic_add(count_ptr, 0, sem="acquire")
        while seen < target:
            seen = tl.atomic_add(count_ptr, 0, sem="acquire")
    tl.debug_barrier()

@triton.jit
def _weight(weight_ptr, program, programs, turn, start, rows: tl.constexpr, size: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows program + programs * r, so that all programs have as many."""
    row = program + programs * (turn * ROWS + tl.arange(0, ROWS))
    column = start + tl.arange(0, BLOCK)
    place = weight_ptr + row[:, None] * size + column[None, :]
    place = tl.multiple_of(place, (16, 16))
    return tl.load(place, mask=(row < rows)[:, None] & (column < size)[None, :], other=0.0, eviction_policy="evict_first")

@triton.constexpr_function
def power_of_two(n):
    n = int(n)
    return 1 << (n - 1).bit_length()

@triton.jit
def _ahead(weight_ptr, program, programs, first: tl.constexpr, count: tl.constexpr, rows: tl.constexpr, size: tl.constexpr):
    """Asks the L2 for `count` of this program's rows, from its `first` one on."""
    row = program + programs * (first + tl.arange(0, power_of_two(count)))
    line = tl.arange(0, power_of_two(size * 2 // 128))
    inside = ((row < rows) & (row < program + programs * (first + count)))[:, None] & (line < size * 2 // 128)[None, :]
    place = weight_ptr + row[:, None] * size + line[None, :] * 64
    place = tl.where(inside, place, weight_ptr)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1)

@triton.jit
def _pointer(table_ptr, index, like):
    return tl.load(table_ptr + index).to(like.dtype)

@triton.jit
def _factor(norm_ptr, size: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    place = tl.multiple_of(norm_ptr + column, (16,))
    return tl.load(place, mask=column < size, other=0.0)

@triton.jit
def _rows(weight, up, g, weight_ptr, x_ptr, y_ptr, eps, program, programs,
          rows: tl.constexpr, size: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
          ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y [rows] of x [size], of which the tile `weight` (and `up`) is there."""
    BLOCKS: tl.constexpr = (size + BLOCK - 1) // BLOCK
    column = tl.arange(0, BLOCK)
    scale = 1.0
    if BLOCKS == 1:
        x = tl.load(x_ptr + column, mask=column < size, other=0.0, cache_modifier=".cg")
        if NORM:
            scale = 1 / tl.sqrt(tl.sum(x * x) / size + eps)
            x *= g.to(tl.float32)
    for turn in range(0, tl.cdiv(rows - program, programs * ROWS)):
        row = program + programs * (turn * ROWS + tl.arange(0, ROWS))
        if ADD:
            old = tl.load(y_ptr + row, mask=row < rows, other=0.0, cache_modifier=".cg")
        y = tl.zeros((ROWS,), tl.float32)
        y_up = tl.zeros((ROWS,), tl.float32)
        for block in tl.static_range(BLOCKS):
            if block + 1 < BLOCKS:
                after = turn
                start = (block + 1) * BLOCK
            else:
                after = turn + 1
                start = 0
            next_weight = _weight(weight_ptr, program, programs, after, start, rows, size, ROWS, BLOCK)
            if GATED:
                next_up = _weight(weight_ptr + rows * size, program, programs, after, start, rows, size, ROWS, BLOCK)
            if BLOCKS > 1:
                x = tl.load(x_ptr + block * BLOCK + column, mask=block * BLOCK + column < size, other=0.0, cache_modifier=".cg")
            y += tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
            weight = next_weight
            if GATED:
                y_up += tl.sum(up.to(tl.float32) * x[None, :], axis=1)
                up = next_up
        y *= scale
        if GATED:
            y = y * tl.sigmoid(y) * (y_up * scale)
        if ADD:
            y += old
        tl.store(y_ptr + row, y, mask=row < rows)

@triton.jit
def _turned(x_ptr, cos_ptr, sin_ptr, position, DIM: tl.constexpr):
    column = tl.arange(0, DIM)
    x = tl.load(x_ptr + column, cache_modifier=".cg").to(tl.float32)
    other = tl.load(x_ptr + (column + DIM // 2) % DIM, cache_modifier=".cg").to(tl.float32)
    sin = tl.load(sin_ptr + position * DIM + column) * tl.where(column < DIM // 2, -1.0, 1.0)
    return x * tl.load(cos_ptr + position * DIM + column) + other * sin

@triton.jit
def _step(
    x_ptr, qkv_ptr, part_ptr, sums_ptr, attended_ptr, hidden_ptr, logits_ptr,   # scratch, float32
    table_ptr,  # [L, 6] int64: qkv, o, gate_up, down, norm, norm
    head_ptr, last_norm_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, position_ptr, count_ptr,
    times_ptr, length, eps, scale,
    L: tl.constexpr, D: tl.constexpr, F: tl.constexpr, V: tl.constexpr, H: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, RQ: tl.constexpr, RO: tl.constexpr, RG: tl.constexpr, RD: tl.constexpr, RH: tl.constexpr,
    DOWN_BLOCK: tl.constexpr, ASM: tl.constexpr,
    AQ: tl.constexpr, AO: tl.constexpr, AG: tl.constexpr, AD: tl.constexpr, AH: tl.constexpr, TIME: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    position = tl.load(position_ptr)
    chunks = tl.cdiv(length, CHUNK)
    QKV: tl.constexpr = (H + 2 * K) * DIM
    column = tl.arange(0, DIM)
    attends = program < H * chunks
    arrived = 0
    for layer in range(L):
        qkv_weight = _pointer(table_ptr, layer * 6, head_ptr)
        o_weight = _pointer(table_ptr, layer * 6 + 1, head_ptr)
        gate_up = _pointer(table_ptr, layer * 6 + 2, head_ptr)
        down = _pointer(table_ptr, layer * 6 + 3, head_ptr)
        norm1 = _pointer(table_ptr, layer * 6 + 4, head_ptr)
        norm2 = _pointer(table_ptr, layer * 6 + 5, head_ptr)
        keys = keys_ptr + layer * K * length * DIM
        values = values_ptr + layer * K * length * DIM
        # q, k, v
        weight = _weight(qkv_weight, program, programs, 0, 0, QKV, D, RQ, BLOCK)
        g = _factor(norm1, D, BLOCK)
        if AQ:
            _ahead(qkv_weight, program, programs, RQ, AQ, QKV, D)
        if layer > 0:
            _wait(count_ptr, arrived, ASM)
        _mark(times_ptr, program, layer * 10 + 0, TIME)
        _rows(weight, weight, g, qkv_weight, x_ptr, qkv_ptr, eps, program, programs, QKV, D, True, False, False, RQ, BLOCK)
        _mark(times_ptr, program, layer * 10 + 1, TIME)
        _arrive(count_ptr)
        arrived += programs
        # attention
        key = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
        place = (program // chunks // (H // K) * length + key)[:, None] * DIM + column[None, :]
        before = ((key < position) & attends)[:, None]
        k = tl.load(keys + place, mask=before, other=0.0)
        v = tl.load(values + place, mask=before, other=0.0)
        if AO:
            _ahead(o_weight, program, programs, 0, AO, D, D)
        _wait(count_ptr, arrived, ASM)
        _mark(times_ptr, program, layer * 10 + 2, TIME)
        for task in range(program, H * chunks, programs):
            head = task // chunks
            kv_head = head // (H // K)
            key = (task % chunks) * CHUNK + tl.arange(0, CHUNK)
            if task > program:
                place = (kv_head * length + key)[:, None] * DIM + column[None, :]
                k = tl.load(keys + place, mask=(key < position)[:, None], other=0.0)
                v = tl.load(values + place, mask=(key < position)[:, None], other=0.0)
            q = _turned(qkv_ptr + head * DIM, cos_ptr, sin_ptr, position, DIM) * scale
            new_k = _turned(qkv_ptr + (H + kv_head) * DIM, cos_ptr, sin_ptr, position, DIM).to(k.dtype)
            new_v = tl.load(qkv_ptr + (H + K + kv_head) * DIM + column, cache_modifier=".cg").to(v.dtype)
            now = (key == position)[:, None]
            k = tl.where(now, new_k[None, :], k)
            v = tl.where(now, new_v[None, :], v)
            tl.store(keys + place, k, mask=now & (head % (H // K) == 0))
            tl.store(values + place, v, mask=now & (head % (H // K) == 0))
            score = tl.where(key <= position, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
            highest = tl.maximum(tl.max(score, axis=0), -1e30)
            p = tl.exp(score - highest)
            tl.store(part_ptr + task * DIM + column, tl.sum(p[:, None] * v.to(tl.float32), axis=0))
            tl.store(sums_ptr + 2 * task, highest)
            tl.store(sums_ptr + 2 * task + 1, tl.sum(p, axis=0))
        _mark(times_ptr, program, layer * 10 + 3, TIME)
        _arrive(count_ptr)
        arrived += programs
        # output projection; each program adds up the parts of all heads
        weight = _weight(o_weight, program, programs, 0, 0, D, D, RO, BLOCK)
        if AG:
            _ahead(gate_up, program, programs, 0, AG, F, D)
            _ahead(gate_up + F * D, program, programs, 0, AG, F, D)
        _wait(count_ptr, arrived, ASM)
        _mark(times_ptr, program, layer * 10 + 4, TIME)
        c = tl.arange(0, CHUNKS)[:, None]
        part = tl.arange(0, H)[None, :] * chunks + c
        there = c < chunks
        highest = tl.load(sums_ptr + 2 * part, mask=there, other=float("-inf"), cache_modifier=".cg")
        amount = tl.load(sums_ptr + 2 * part + 1, mask=there, other=0.0, cache_modifier=".cg")
        parts = tl.load(part_ptr + (part * DIM)[:, :, None] + column[None, None, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        factor = tl.exp(highest - tl.max(highest, axis=0)[None, :])
        factor = factor / tl.sum(factor * amount, axis=0)[None, :]  # [CHUNKS, H]
        x = tl.reshape(tl.sum(parts * factor[:, :, None], axis=0), (H * DIM,))
        for turn in range(0, tl.cdiv(D - program, programs * RO)):
            row = program + programs * (turn * RO + tl.arange(0, RO))
            old = tl.load(x_ptr + row, mask=row < D, other=0.0, cache_modifier=".cg")
            next_weight = _weight(o_weight, program, programs, turn + 1, 0, D, D, RO, BLOCK)
            y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
            tl.store(x_ptr + row, y + old, mask=row < D)
            weight = next_weight
        _mark(times_ptr, program, layer * 10 + 5, TIME)
        _arrive(count_ptr)
        arrived += programs
        # gate and up
        weight = _weight(gate_up, program, programs, 0, 0, F, D, RG, BLOCK)
        up = _weight(gate_up + F * D, program, programs, 0, 0, F, D, RG, BLOCK)
        g = _factor(norm2, D, BLOCK)
        _wait(count_ptr, arrived, ASM)
        _mark(times_ptr, program, layer * 10 + 6, TIME)
        _rows(weight, up, g, gate_up, x_ptr, hidden_ptr, eps, program, programs, F, D, True, True, False, RG, BLOCK)
        _mark(times_ptr, program, layer * 10 + 7, TIME)
        _arrive(count_ptr)
        arrived += programs
        # down
        weight = _weight(down, program, programs, 0, 0, D, F, RD, DOWN_BLOCK)
        if AD:
            _ahead(down, program, programs, 0, AD, D, F)
        _wait(count_ptr, arrived, ASM)
        _mark(times_ptr, program, layer * 10 + 8, TIME)
        _rows(weight, weight, g, down, hidden_ptr, x_ptr, eps, program, programs, D, F, False, False, True, RD, DOWN_BLOCK)
        _mark(times_ptr, program, layer * 10 + 9, TIME)
        _arrive(count_ptr)
        arrived += programs
    weight = _weight(head_ptr, program, programs, 0, 0, V, D, RH, BLOCK)
    g = _factor(last_norm_ptr, D, BLOCK)
    if AH:
        _ahead(head_ptr, program, programs, RH, AH, V, D)
    _wait(count_ptr, arrived, ASM)
    _rows(weight, weight, g, head_ptr, x_ptr, logits_ptr, eps, program, programs, V, D, True, False, False, RH, BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == arrived + programs - 1:
        tl.store(count_ptr, 0)


DEFAULT = dict(programs=132, warps=16, BLOCK=None, RQ=16, RO=16, RG=8, RD=16, RH=16, DOWN_BLOCK=None, CHUNK=None, ASM=False, AQ=0, AO=0, AG=0, AD=0, AH=0, TIME=0)


def persistent(decoder, **choice):
    c = DEFAULT | choice
    config = decoder.config
    model = decoder.model
    device = decoder.device
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    H, K, DIM = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    length = decoder.keys.shape[2]
    new = lambda *shape: torch.zeros(*shape, device=device)
    if not c["CHUNK"]:
        c["CHUNK"] = 64
        while H * triton.cdiv(length, c["CHUNK"]) > c["programs"]:
            c["CHUNK"] *= 2
    chunks = triton.cdiv(length, c["CHUNK"])
    x, qkv, parts, sums, attended, hidden = new(D), new((H + 2 * K) * DIM), new(H, chunks, DIM), new(H, chunks, 2), new(D), new(F)
    logits = torch.zeros(V, device=device, dtype=model.lm_head.weight.dtype)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    table = torch.tensor([[w.data_ptr() for w in (l.self_attn.qkv_proj.weight, l.self_attn.o_proj.weight, l.mlp.gate_up_proj.weight, l.mlp.down_proj.weight, l.input_layernorm.weight, l.post_attention_layernorm.weight)] for l in model.layers], device=device)
    times = torch.zeros(10 * config.num_layers, dtype=torch.int64, device=device)
    keep = (times, x, qkv, parts, sums, attended, hidden, logits, count, table)

    @torch.no_grad()
    def step(ids, position):
        x.copy_(model.embed_tokens(ids)[0])
        kernel = _step[c["programs"],](
            x, qkv, parts, sums, attended, hidden, logits, table, model.lm_head.weight, model.norm.weight, decoder.keys, decoder.values,
            *decoder.tables, position, count, times, length, model.norm.eps, DIM**-0.5,
            L=config.num_layers, D=D, F=F, V=V, H=H, K=K, DIM=DIM, CHUNK=c["CHUNK"], CHUNKS=triton.next_power_of_2(chunks),
            BLOCK=c["BLOCK"] or triton.next_power_of_2(D), RQ=c["RQ"], RO=c["RO"], RG=c["RG"], RD=c["RD"], RH=c["RH"],
            DOWN_BLOCK=c["DOWN_BLOCK"] or triton.next_power_of_2(D), ASM=c["ASM"],
            AQ=c["AQ"], AO=c["AO"], AG=c["AG"], AD=c["AD"], AH=c["AH"], TIME=c["TIME"],
            num_warps=c["warps"], **({"maxnreg": c["maxnreg"]} if c.get("maxnreg") else {}), **({} if INTERPRETED else {"launch_cooperative_grid": True}),
        )
        step.kernel = kernel
        return logits
    step.keep = keep
    step.times = times
    return step
