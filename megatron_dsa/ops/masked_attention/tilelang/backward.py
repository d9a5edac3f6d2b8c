"""Backward of masked dense attention, 128 keys of one head per thread block (sm_90a).

* ``consume``: each of two warpgroups keeps the gradients of 64 keys in registers and loops over
  tiles of 64 queries. Keys are the M dim of products, so P and dS are register operands. For dQ,
  each multiplies both warpgroups' dS by half of the columns, one tile later, so neither waits;
* ``produce``: one warp fetches keys, then queries, dO, lse and delta.

If dK and dV together exceed the registers, :mod:`.value_gradient` computes dV. With ``ordered``,
thread blocks add to dQ in descending order of keys, so results are repeatable.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call, shared_address
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP, LOG2_E, SLAB
from megatron_dsa.ops.masked_attention.tilelang.gradients import COMPUTED, SOURCE
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    BLOCK_WORK_SOURCE,
    BY_COLUMNS,
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

#: Queries per tile; more queries would exceed the registers.
QUERIES = 64
NUMBERS = 4 * QUERIES


@T.macro
def fetch_keys(KV, Kpe, m, done, at, dims):
    last = at.first + KEYS
    fetch(KV[at.first : last, at.head, 0 : dims.nope], m.k[:, 0 : dims.nope], done.k[0])
    if dims.rope > 0:
        fetch(Kpe[at.first : last, :], m.k[:, dims.nope : dims.qk], done.k[0])


@T.macro
def fetch_queries(Q, Numbers, m, done, query, slot, at):
    fetch(Q[query : query + QUERIES, at.head, :], m.q[slot, :, :], done.q[slot])
    numbers = Numbers[at.head, 0:2, query : query + QUERIES]
    fetch(numbers, m.numbers[slot, :, :], done.q[slot])
    T.barrier_arrive(done.q[slot])


@T.macro
def fetch_gradients(dO, m, done, query, slot, at):
    fetch(dO[query : query + QUERIES, at.head, :], m.do[slot, :, :], done.do[slot])
    T.barrier_arrive(done.do[slot])


@T.macro
def produce(Q, KV, Kpe, dO, Numbers, Tiles, m, done, at, dims):
    fetch_keys(KV, Kpe, m, done, at, dims)
    last = at.first + KEYS
    fetch(KV[at.first : last, at.head, dims.nope : dims.nope + dims.v], m.v, done.k[0])
    T.barrier_arrive(done.k[0])
    stages = dims.tiling.stages
    for i in T.serial(at.n):
        query = Tiles[at.block, i] * QUERIES
        slot = i % stages
        if dims.tiling.split:
            # Consumers free the slot of dO before the slot of Q.
            T.barrier_wait(done.do_free[slot], (i // stages & 1) ^ 1)
            fetch_gradients(dO, m, done, query, slot, at)
            T.barrier_wait(done.q_free[slot], (i // stages & 1) ^ 1)
            fetch_queries(Q, Numbers, m, done, query, slot, at)
        else:
            T.barrier_wait(done.q_free[slot], (i // stages & 1) ^ 1)
            fetch_queries(Q, Numbers, m, done, query, slot, at)
            fetch_gradients(dO, m, done, query, slot, at)


@T.macro
def read_bits(BitsT, words, tile, at, tx):
    key = at.first + thread_row(tx)
    half = T.cast(tile % 2 * 16, "uint32")
    for r in tuple(range(2)):
        words[r] = T.reinterpret(BitsT[key + 8 * r, tile // 2, tx % 4], "uint32") >> half


@T.macro
def add_queries(dQ, Turns, Order, m, done, dq, tile, i, at, dims, ordered, tx):
    T.barrier_wait(done.ds[i % STAGES], i // STAGES & 1)
    T.wgmma_gemm(
        m.ds[i % STAGES, :, :], m.k, dq, transpose_A=True, clear_accum=True, policy=BY_COLUMNS
    )
    T.wait_wgmma(0)
    T.barrier_arrive(done.ds_free[i % STAGES])
    if ordered:
        call(
            "dsa_wait_turn",
            T.address_of(Turns[at.part_head, tile, tx // GROUP]),
            Order[at.block, i],
            4 + tx // GROUP,
        )
    query = tile * QUERIES + thread_row(tx % GROUP)
    call(
        "dsa_add",
        T.address_of(dQ[query, at.part_head, tx // GROUP * (dims.qk // 2)]),
        dq.data,
        T.cast(dQ.strides[0], "int64"),
        dQ.shape[0] - query,
        of=(dims.qk // 16,),
    )
    if ordered:
        call("dsa_end_turn", T.address_of(Turns[at.part_head, tile, tx // GROUP]), 4 + tx // GROUP)


@T.macro
def gradients(m, done, s, p, dp, dv, lse, words, slot, parity, scale):
    T.barrier_wait(done.q[slot], parity)
    T.wgmma_gemm(m.k, m.q[slot, :, :], s, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wait_wgmma(0)
    probabilities(s, lse, words, scale)
    T.copy(s, p)
    T.barrier_wait(done.do[slot], parity)
    T.wgmma_gemm(m.v, m.do[slot, :, :], dp, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wgmma_gemm(p, m.do[slot, :, :], dv, policy=BY_ROWS)
    T.wait_wgmma(1)
    call("dsa_score_gradient", p.data, dp.data, lse + NUMBERS, of=(QUERIES // 8,))


@T.macro
def score_gradients(m, done, s, p, dp, computed, lse, words, slot, parity, scale):
    """Compute P while dP's product runs, then overwrite dP with dS."""
    T.barrier_wait(done.q[slot], parity)
    T.wgmma_gemm(m.k, m.q[slot, :, :], s, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.barrier_wait(done.do[slot], parity)
    T.wgmma_gemm(m.v, m.do[slot, :, :], dp, transpose_B=True, clear_accum=True, policy=BY_ROWS)
    T.wait_wgmma(1)
    probabilities(s, lse, words, scale)
    call("dsa_computed", computed, s.data, of=(QUERIES // 8,))
    T.copy(s, p)
    T.wait_wgmma(0)
    T.barrier_arrive(done.do_free[slot])
    call("dsa_score_gradient", p.data, dp.data, lse + NUMBERS, of=(QUERIES // 8,))


def probabilities(s, lse, words, scale):
    return call(
        "dsa_probabilities", s.data, lse, words[0], words[1], scale * LOG2_E, of=(QUERIES // 8,)
    )


@T.macro
def consume(BitsT, Tiles, dQ, Turns, Order, dKV, dKpe, m, done, at, dims, ordered, scale, tx):
    s, dp = (T.alloc_fragment([KEYS, QUERIES], "float32") for _ in range(2))
    p, ds = (T.alloc_fragment([KEYS, QUERIES], "bfloat16") for _ in range(2))
    dk = T.alloc_fragment([KEYS, dims.qk], "float32")
    if not dims.tiling.split:
        dv = T.alloc_fragment([KEYS, dims.v], "float32")
    dq = T.alloc_fragment([QUERIES, dims.qk], "float32")
    words = T.alloc_local([2], "uint32")
    tile = T.alloc_local([3], "int32")
    numbers = T.alloc_local([1], "int32")
    numbers[0] = shared_address(m.numbers[0, 0, 0])
    T.clear(dk)
    if dims.tiling.split:
        computed = T.alloc_local([1], "int32")
        computed[0] = shared_address(done.computed[0])
    else:
        T.clear(dv)
    if at.n > 0:
        tile[1] = Tiles[at.block, 0]
        tile[2] = tile[1]
        read_bits(BitsT, words, tile[1], at, tx)
    T.barrier_wait(done.k[0], 0)
    stages = dims.tiling.stages
    for i in T.serial(at.n):
        slot, ds_slot, parity = i % stages, i % STAGES, i // stages & 1
        lse = numbers[0] + slot * (2 * NUMBERS)
        if i + 1 < at.n:
            tile[2] = Tiles[at.block, i + 1]
        if dims.tiling.split:
            score_gradients(
                m, done, s, p, dp, computed[0], lse, words, slot, parity, scale
            )  # fmt: skip
        else:
            gradients(m, done, s, p, dp, dv, lse, words, slot, parity, scale)
        read_bits(BitsT, words, tile[2], at, tx)
        T.copy(dp, ds)
        T.barrier_wait(done.ds_free[ds_slot], (i // STAGES & 1) ^ 1)
        T.copy(ds, m.ds[ds_slot, :, :])
        T.fence_proxy_async()
        T.barrier_arrive(done.ds[ds_slot])
        T.wgmma_gemm(ds, m.q[slot, :, :], dk, policy=BY_ROWS)
        # Overlapping the products for dK and dQ would exceed the registers.
        T.wait_wgmma(0)
        T.barrier_arrive(done.q_free[slot])
        if i > 0:
            add_queries(dQ, Turns, Order, m, done, dq, tile[0], i - 1, at, dims, ordered, tx)
        tile[0] = tile[1]
        tile[1] = tile[2]
    if at.n > 0:
        add_queries(dQ, Turns, Order, m, done, dq, tile[0], at.n - 1, at, dims, ordered, tx)
    call("dsa_times", dk.data, scale, of=(dims.qk // 8,))
    # Gradients overwrite the keys in shared memory.
    T.sync_threads(3, 2 * GROUP)
    if dims.tiling.split:
        T.copy(dk, m.k)
        T.sync_threads(3, 2 * GROUP)
        write_columns(dKV, m.k, dims.nope, 0, at, tx)
    else:
        T.copy(dv, m.v)
        T.copy(dk, m.k)
        T.sync_threads(3, 2 * GROUP)
        write_both(dKV, m, at, dims, tx)
    if dims.rope > 0:
        for r in T.unroll(KEYS // 32):
            row = r * 32 + tx // 8
            if at.first + row < dKV.shape[0]:
                for c in T.vectorized(8):
                    dKpe[at.first + row, at.part_head, tx % 8 * 8 + c] = m.k[
                        row, dims.nope + tx % 8 * 8 + c
                    ]


@T.macro
def write_columns(dKV, source, columns, offset, at, tx):
    for r in T.unroll(KEYS // 32):
        row = r * 32 + tx // 8
        if at.first + row < dKV.shape[0]:
            for u in T.unroll(columns // SLAB):
                for c in T.vectorized(8):
                    dKV[at.first + row, at.head, offset + u * SLAB + tx % 8 * 8 + c] = source[
                        row, u * SLAB + tx % 8 * 8 + c
                    ]


@T.macro
def write_both(dKV, m, at, dims, tx):
    for r in T.unroll(KEYS // 16):
        row = r * 16 + tx // 16
        if at.first + row < dKV.shape[0]:
            for c in T.vectorized(8):
                dKV[at.first + row, at.head, tx % 16 * 8 + c] = m.k[row, tx % 16 * 8 + c]
            for c in T.vectorized(8):
                dKV[at.first + row, at.head, dims.nope + tx % 16 * 8 + c] = m.v[
                    row, tx % 16 * 8 + c
                ]


def build(nope: int, rope: int, v: int, ordered: bool = False):
    """Return the TileLang program, whose launches process ``part`` heads from ``first`` on.

    Arguments are contiguous. Numbers: result of ``numbers``. BitsT: transposed bits. Tiles: tiles
    of queries per group of keys. Turns: zeros, and Order: the thread block's turn at each tile,
    both for ``ordered``. dQ: accumulator, unscaled, in fragment order
    (:func:`megatron_dsa.ops.hopper.sums.in_column_order`). dKV: written without values if
    ``split``. scale: positive.
    """
    dims = Dims(nope, rope, v)
    split, stages = dims.tiling.split, dims.tiling.stages
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    queries, keys, heads, part = T.dynamic("queries, keys, heads, part")
    padded, count, groups, blocks, width = T.dynamic("padded, count, groups, blocks, width")
    tiles, turns, ordered_blocks = T.dynamic("tiles, turns, ordered_blocks")

    @T.prim_func
    def masked_attention_backward(
        Q: T.Tensor([queries, heads, nope + rope], bf16),
        KV: T.Tensor([keys, heads, nope + v], bf16),
        Kpe: T.Tensor([keys, rope] if rope else [1, 1], bf16),
        dO: T.Tensor([queries, heads, v], bf16),
        Numbers: T.Tensor([heads, 2, count], fp32),
        BitsT: T.Tensor([padded, groups, 4], int32),
        Tiles: T.Tensor([blocks, width], int32),
        Count: T.Tensor([blocks], int32),
        Turns: T.Tensor([turns, tiles, 2], int32),
        Order: T.Tensor([ordered_blocks, width] if ordered else [1, 1], int32),
        dQ: T.Tensor([queries, part, nope + rope], fp32),
        dKV: T.Tensor([keys, heads, nope + v], bf16),
        dKpe: T.Tensor([keys, part, max(rope, 1)], bf16),
        first: T.int32,
        scale: T.float32,
        together: T.int32,
    ):
        with T.Kernel(blocks * part, threads=THREADS) as number:
            T.import_source(SOURCE + (COMPUTED if split else "") + BLOCK_WORK_SOURCE)
            m = SimpleNamespace(
                k=T.alloc_shared([KEYS, nope + rope], bf16),
                v=T.alloc_shared([KEYS, v], bf16),
                q=T.alloc_shared([stages, QUERIES, nope + rope], bf16),
                do=T.alloc_shared([stages, QUERIES, v], bf16),
                ds=T.alloc_shared([STAGES, KEYS, QUERIES], bf16),
                numbers=T.alloc_shared([stages, 2, QUERIES], fp32),
            )
            done = SimpleNamespace(
                k=T.alloc_barrier(arrive_count=[32]),
                q=T.alloc_barrier(arrive_count=[32] * stages),
                do=T.alloc_barrier(arrive_count=[32] * stages),
                q_free=T.alloc_barrier(arrive_count=[2 * GROUP] * stages),
                ds=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
                ds_free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
                do_free=T.alloc_barrier(arrive_count=[2 * GROUP] * stages) if split else None,
                computed=T.alloc_barrier(arrive_count=[2 * GROUP]) if split else None,
            )
            tx = T.get_thread_binding()
            # The first keys usually have the most tiles, so they run first unless `ordered`.
            work = block_work(Count, number, part, together, KEYS, ordered)
            at = SimpleNamespace(
                block=work.block, first=work.first, n=work.n, part_head=work.head,
                head=first + work.head,
            )  # fmt: skip
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[1], 0)
                if tx < 2 * GROUP + 32:
                    produce(Q, KV, Kpe, dO, Numbers, Tiles, m, done, at, dims)
            else:
                T.set_max_nreg(REGISTERS[0], 1)
                consume(
                    BitsT, Tiles, dQ, Turns, Order, dKV, dKpe, m, done, at, dims, ordered, scale, tx
                )  # fmt: skip

    return masked_attention_backward


compiled = compiler(build, PASSES)
