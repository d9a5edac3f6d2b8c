"""Sums over heads of the probabilities in a tile of 128 queries and 128 keys (sm_90a).

Two warpgroups of 64 queries each sum all heads in registers. One warp fetches queries, keys and lse
per head, in slabs of 64 dims if two heads exceed shared memory.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.tiles import GROUP, LOG2_E, SLAB
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    BY_ROWS,
    KEYS,
    STAGES,
    Dims,
    fetch,
    thread_row,
)

QUERIES = 128
SUMS_PER_THREAD = QUERIES * KEYS // (2 * GROUP)

SOURCE = r"""
// sums += exp2(S * scale - lse)
template <int N>
__device__ __forceinline__ void dsa_add_head(float* sums, const float* s, float upper, float lower,
                                             float scale) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) sums[i] += exp2f(fmaf(s[i], scale, -(i % 4 / 2 ? lower : upper)));
}
"""


def shared(dims: Dims, rope_per_head: bool = False):
    rope_per_head = rope_per_head or dims.rope == 0
    bf16, fp32, slots = "bfloat16", "float32", dims.tiling.slots
    m = SimpleNamespace(rope_per_head=rope_per_head)
    if slots > 0:
        m.q = T.alloc_shared([slots, QUERIES, SLAB], bf16)
        m.k = T.alloc_shared([slots, KEYS, SLAB], bf16)
    else:
        m.q_nope = T.alloc_shared([STAGES, QUERIES, dims.nope], bf16)
        m.q_rope = T.alloc_shared([STAGES, QUERIES, dims.rope], bf16)
        m.k_nope = T.alloc_shared([STAGES, KEYS, dims.nope], bf16)
    if not rope_per_head:
        m.k_rope = T.alloc_shared([KEYS, dims.rope], bf16)
    elif slots == 0:
        m.k_rope = T.alloc_shared([STAGES, KEYS, dims.rope], bf16)
    m.lse = T.alloc_shared([slots or STAGES, 1, QUERIES], fp32)
    return m


def barriers(dims: Dims):
    stages = dims.tiling.slots or STAGES
    return SimpleNamespace(
        k_rope=T.alloc_barrier(arrive_count=[32]),
        full=T.alloc_barrier(arrive_count=[32] * stages),
        free=T.alloc_barrier(arrive_count=[2 * GROUP] * stages),
    )


@T.macro
def produce_heads(Q, K, Lse, m, done, at, dims):
    last, end = at.first + QUERIES, at.key + KEYS
    for h in T.serial(at.heads):
        slot, head, key_head = h % STAGES, at.head + h, at.key_head + h
        T.barrier_wait(done.free[slot], (h // STAGES & 1) ^ 1)
        fetch(Q[at.first : last, head, 0 : dims.nope], m.q_nope[slot, :, :], done.full[slot])
        fetch(Q[at.first : last, head, dims.nope : dims.qk], m.q_rope[slot, :, :], done.full[slot])
        fetch(K[at.key : end, key_head, 0 : dims.nope], m.k_nope[slot, :, :], done.full[slot])
        if m.rope_per_head:
            fetch(
                K[at.key : end, key_head, dims.nope : dims.qk], m.k_rope[slot, :, :],
                done.full[slot],
            )  # fmt: skip
        fetch(Lse[head, 0:1, at.first : last], m.lse[slot, :, :], done.full[slot])
        T.barrier_arrive(done.full[slot])


@T.macro
def produce_slabs(Q, K, Lse, m, done, at, dims):
    last, slots = at.first + QUERIES, dims.tiling.slots
    slabs = dims.qk // SLAB
    for i in T.serial(at.heads * slabs):
        h, slot, column = i // slabs, i % slots, i % slabs * SLAB
        T.barrier_wait(done.free[slot], (i // slots & 1) ^ 1)
        fetch(
            Q[at.first : last, at.head + h, column : column + SLAB], m.q[slot, :, :],
            done.full[slot],
        )  # fmt: skip
        if column < (dims.qk if m.rope_per_head else dims.nope):
            keys = K[at.key : at.key + KEYS, at.key_head + h, column : column + SLAB]
            fetch(keys, m.k[slot, :, :], done.full[slot])
        if column == 0:
            fetch(Lse[at.head + h, 0:1, at.first : last], m.lse[slot, :, :], done.full[slot])
        T.barrier_arrive(done.full[slot])


@T.macro
def produce(Q, K, Kpe, Lse, m, done, at, dims):
    if not m.rope_per_head:
        fetch(Kpe[at.key : at.key + KEYS, :], m.k_rope, done.k_rope[0])
        T.barrier_arrive(done.k_rope[0])
    if dims.tiling.slots > 0:
        produce_slabs(Q, K, Lse, m, done, at, dims)
    else:
        produce_heads(Q, K, Lse, m, done, at, dims)


@T.macro
def read_lse(m, lse, slot, tx):
    for r in tuple(range(2)):
        lse[r] = m.lse[slot, 0, thread_row(tx) + 8 * r]


def rope_key(m, slot):
    return m.k_rope[slot, :, :] if m.rope_per_head else m.k_rope


@T.macro
def multiply_head(m, done, s, lse, h, tx):
    slot = h % STAGES
    T.barrier_wait(done.full[slot], h // STAGES & 1)
    T.wgmma_gemm(
        m.q_nope[slot, :, :], m.k_nope[slot, :, :], s, transpose_B=True, clear_accum=True,
        policy=BY_ROWS,
    )  # fmt: skip
    T.wgmma_gemm(m.q_rope[slot, :, :], rope_key(m, slot), s, transpose_B=True, policy=BY_ROWS)
    read_lse(m, lse, slot, tx)
    T.wait_wgmma(0)
    T.barrier_arrive(done.free[slot])


@T.macro
def multiply_slabs(m, done, s, lse, h, dims, tx):
    slots, slabs = dims.tiling.slots, dims.qk // SLAB
    for slab in tuple(range(slabs)):
        i = h * slabs + slab
        T.barrier_wait(done.full[i % slots], i // slots & 1)
        if m.rope_per_head or slab * SLAB < dims.nope:
            T.wgmma_gemm(
                m.q[i % slots, :, :], m.k[i % slots, :, :], s, transpose_B=True,
                clear_accum=slab == 0, policy=BY_ROWS,
            )  # fmt: skip
        else:
            T.wgmma_gemm(m.q[i % slots, :, :], m.k_rope, s, transpose_B=True, policy=BY_ROWS)
        if slab == 0:
            read_lse(m, lse, i % slots, tx)
        else:
            T.wait_wgmma(1)
            T.barrier_arrive(done.free[(i - 1) % slots])
    T.wait_wgmma(0)
    T.barrier_arrive(done.free[(h * slabs + slabs - 1) % slots])


@T.macro
def add_heads(sums, m, done, at, dims, scale, tx):
    s = T.alloc_fragment([QUERIES, KEYS], "float32")
    lse = T.alloc_local([2], "float32")
    for i in T.unroll(SUMS_PER_THREAD):
        sums[i] = 0.0
    if not m.rope_per_head:
        T.barrier_wait(done.k_rope[0], 0)
    for h in T.serial(at.heads):
        if dims.tiling.slots > 0:
            multiply_slabs(m, done, s, lse, h, dims, tx)
        else:
            multiply_head(m, done, s, lse, h, tx)
        call("dsa_add_head", sums.data, s.data, lse[0], lse[1], scale * LOG2_E, of=(KEYS // 8,))
