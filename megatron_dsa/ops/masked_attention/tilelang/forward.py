"""Forward of masked dense attention, 128 queries of one head per thread block (sm_90a).

* ``consume``: two warpgroups of 64 queries each; ``O += P V`` overlaps with the next tile's P;
* ``produce``: one warp fetches queries, keys and values of tiles with a selected key.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call, shared_address
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP, LN_2, LOG2_E
from megatron_dsa.ops.masked_attention.tilelang.softmax import SOURCE
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    BLOCK_WORK_SOURCE,
    BY_ROWS,
    KEYS,
    PASSES,
    REGISTERS,
    STAGES,
    THREADS,
    Dims,
    block_work,
    fetch,
    thread_row,
)

QUERIES = 128
#: Initial maximum, finite so that exponents of masked scores are -inf instead of NaN.
LOWEST = -1e30


@T.macro
def produce(Q, KV, Kpe, Tiles, m, done, at, dims):
    if at.n > 0:
        last = at.first + QUERIES
        if dims.tiling.joined:
            fetch(Q[at.first : last, at.head, :], m.q[0], done.q[0])
        else:
            fetch(Q[at.first : last, at.head, 0 : dims.nope], m.q[0], done.q[0])
            fetch(Q[at.first : last, at.head, dims.nope : dims.qk], m.q[1], done.q[0])
        T.barrier_arrive(done.q[0])
    keys = dims.tiling.forward_keys
    for i in T.serial(at.n):
        key = group_of(Tiles, at, i, keys) * KEYS + i % (KEYS // keys) * keys
        slot = i % STAGES
        T.barrier_wait(done.k_free[slot], (i // STAGES & 1) ^ 1)
        without_rope = KV[key : key + keys, at.head, 0 : dims.nope]
        if dims.tiling.joined:
            fetch(without_rope, m.k[0][slot, :, 0 : dims.nope], done.k[slot])
            if dims.rope > 0:
                fetch(Kpe[key : key + keys, :], m.k[0][slot, :, dims.nope : dims.qk], done.k[slot])
        else:
            fetch(without_rope, m.k[0][slot, :, :], done.k[slot])
            fetch(Kpe[key : key + keys, :], m.k[1][slot, :, :], done.k[slot])
        T.barrier_arrive(done.k[slot])
        T.barrier_wait(done.v_free[slot], (i // STAGES & 1) ^ 1)
        values = KV[key : key + keys, at.head, dims.nope : dims.nope + dims.v]
        fetch(values, m.v[slot, :, :], done.v[slot])
        T.barrier_arrive(done.v[slot])


def group_of(Tiles, at, i, keys):
    return Tiles[at.block, i // (KEYS // keys)]


@T.macro
def read_bits(Bits, Tiles, words, group, at, i, keys, tx):
    query = at.first + thread_row(tx)
    for r in tuple(range(2)):
        words[r] = T.cast(0, "uint32")
        if query + 8 * r < Bits.shape[0]:
            words[r] = T.reinterpret(Bits[query + 8 * r, group[0], tx % 4], "uint32")
            if keys < KEYS:
                words[r] = words[r] >> T.cast(i % 2 * 16, "uint32") & T.cast(0xFFFF, "uint32")
    if i + 1 < at.n:
        group[0] = group_of(Tiles, at, i + 1, keys)


@T.macro
def multiply_keys(m, s, slot):
    for part in tuple(range(len(m.q))):
        T.wgmma_gemm(
            m.q[part], m.k[part][slot, :, :], s, transpose_B=True, clear_accum=part == 0,
            policy=BY_ROWS,
        )  # fmt: skip


@T.macro
def softmax(s, words, top, total, decay, keys, scale):
    call("dsa_select", s.data, words[0], words[1], of=(keys // 8,))
    call("dsa_softmax", s.data, top.data, total.data, decay.data, scale * LOG2_E, of=(keys // 8,))


@T.macro
def consume(Bits, Tiles, O, Lse, m, done, at, dims, scale, tx):  # noqa: E741
    keys = dims.tiling.forward_keys
    s = T.alloc_fragment([QUERIES, keys], "float32")
    p = T.alloc_fragment([QUERIES, keys], "bfloat16")
    o = T.alloc_fragment([QUERIES, dims.v], "float32")
    words, group = T.alloc_local([2], "uint32"), T.alloc_local([1], "int32")
    top, total, decay = (T.alloc_local([2], "float32") for _ in range(3))
    computed = T.alloc_local([1], "int32")
    computed[0] = shared_address(done.computed[0])
    T.clear(o)
    for r in tuple(range(2)):
        top[r] = LOWEST
        total[r] = 0.0
    if at.n > 0:
        group[0] = Tiles[at.block, 0]
        read_bits(Bits, Tiles, words, group, at, 0, keys, tx)
        T.barrier_wait(done.q[0], 0)
        T.barrier_wait(done.k[0], 0)
        multiply_keys(m, s, 0)
        T.wait_wgmma(0)
        T.barrier_arrive(done.k_free[0])
        softmax(s, words, top, total, decay, keys, scale)
        T.copy(s, p)
        for i in T.serial(1, at.n):
            slot, before = i % STAGES, (i - 1) % STAGES
            read_bits(Bits, Tiles, words, group, at, i, keys, tx)
            T.barrier_wait(done.k[slot], i // STAGES & 1)
            multiply_keys(m, s, slot)
            T.barrier_wait(done.v[before], (i - 1) // STAGES & 1)
            T.wgmma_gemm(p, m.v[before, :, :], o, policy=BY_ROWS)
            T.wait_wgmma(1)
            T.barrier_arrive(done.k_free[slot])
            softmax(s, words, top, total, decay, keys, scale)
            call("dsa_computed", computed[0], total.data)
            T.wait_wgmma(0)
            T.barrier_arrive(done.v_free[before])
            T.copy(s, p)
            call("dsa_rescale", o.data, decay.data, of=(dims.v // 8,))
        last = (at.n - 1) % STAGES
        T.barrier_wait(done.v[last], (at.n - 1) // STAGES & 1)
        T.wgmma_gemm(p, m.v[last, :, :], o, policy=BY_ROWS)
        T.wait_wgmma(0)
    call("dsa_finish", total.data, decay.data)
    call("dsa_scale", o.data, decay.data, of=(dims.v // 8,))
    write(O, Lse, m, o, top, total, at, dims, tx)


@T.macro
def write(O, Lse, m, o, top, total, at, dims, tx):  # noqa: E741
    # Outputs overwrite the queries in shared memory.
    T.copy(o, m.q[0])
    T.sync_threads(1 + tx // GROUP, GROUP)
    across = dims.v // 8
    rows = GROUP // across
    for r in T.unroll(64 // rows):
        row = tx // GROUP * 64 + r * rows + tx % GROUP // across
        if at.first + row < O.shape[0]:
            for c in T.vectorized(8):
                O[at.first + row, at.head, tx % across * 8 + c] = m.q[0][row, tx % across * 8 + c]
    if tx % 4 == 0:
        for r in tuple(range(2)):
            query = at.first + thread_row(tx) + 8 * r
            if query < O.shape[0]:
                Lse[query, at.head] = T.if_then_else(
                    total[r] == 0, -T.infinity("float32"), (top[r] + T.log2(total[r])) * LN_2
                )


def build(nope: int, rope: int, v: int):
    """Return the TileLang program of the forward.

    Arguments are contiguous. Kpe: unused without rope. Tiles: groups of keys per block of queries.
    Lse: natural, ``-inf`` without keys. scale: positive. together: heads that share L2.
    """
    dims = Dims(nope, rope, v)
    tile = dims.tiling.forward_keys
    parts = (dims.qk,) if dims.tiling.joined else (nope, rope)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    queries, keys, heads, groups, blocks, width = T.dynamic(
        "queries, keys, heads, groups, blocks, width"
    )

    @T.prim_func
    def masked_attention_forward(
        Q: T.Tensor([queries, heads, nope + rope], bf16),
        KV: T.Tensor([keys, heads, nope + v], bf16),
        Kpe: T.Tensor([keys, rope] if rope else [1, 1], bf16),
        Bits: T.Tensor([queries, groups, 4], int32),
        Tiles: T.Tensor([blocks, width], int32),
        Count: T.Tensor([blocks], int32),
        O: T.Tensor([queries, heads, v], bf16),  # noqa: E741
        Lse: T.Tensor([queries, heads], fp32),
        scale: T.float32,
        together: T.int32,
    ):
        with T.Kernel(blocks * heads, threads=THREADS) as number:
            T.import_source(SOURCE + BLOCK_WORK_SOURCE)
            m = SimpleNamespace(
                q=tuple(T.alloc_shared([QUERIES, part], bf16) for part in parts),
                k=tuple(T.alloc_shared([STAGES, tile, part], bf16) for part in parts),
                v=T.alloc_shared([STAGES, tile, v], bf16),
            )
            done = SimpleNamespace(
                q=T.alloc_barrier(arrive_count=[32]),
                k=T.alloc_barrier(arrive_count=[32] * STAGES),
                v=T.alloc_barrier(arrive_count=[32] * STAGES),
                k_free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
                v_free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
                computed=T.alloc_barrier(arrive_count=[2 * GROUP]),
            )
            tx = T.get_thread_binding()
            at = block_work(Count, number, heads, together, QUERIES, True, KEYS // tile)
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[1], 0)
                if tx < 2 * GROUP + 32:
                    produce(Q, KV, Kpe, Tiles, m, done, at, dims)
            else:
                T.set_max_nreg(REGISTERS[0], 1)
                consume(Bits, Tiles, O, Lse, m, done, at, dims, scale, tx)

    return masked_attention_forward


compiled = compiler(build, PASSES)
