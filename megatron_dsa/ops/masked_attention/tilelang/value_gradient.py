"""Kernel for dV of masked dense attention, for tilings with ``split`` (sm_90a).

Two warpgroups compute 64 keys each; ``dV += P dO`` overlaps with the next tile's P. One warp
fetches keys, then queries, lse and dO.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call, shared_address
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP
from megatron_dsa.ops.masked_attention.tilelang.backward import (
    NUMBERS,
    QUERIES,
    fetch_gradients,
    fetch_keys,
    fetch_queries,
    probabilities,
    read_bits,
    write_columns,
)
from megatron_dsa.ops.masked_attention.tilelang.gradients import COMPUTED, SOURCE
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
)


@T.macro
def produce(Q, KV, Kpe, dO, Numbers, Tiles, m, done, at, dims):
    fetch_keys(KV, Kpe, m, done, at, dims)
    T.barrier_arrive(done.k[0])
    for i in T.serial(at.n):
        query = Tiles[at.block, i] * QUERIES
        slot = i % STAGES
        T.barrier_wait(done.q_free[slot], (i // STAGES & 1) ^ 1)
        fetch_queries(Q, Numbers, m, done, query, slot, at)
        T.barrier_wait(done.do_free[slot], (i // STAGES & 1) ^ 1)
        fetch_gradients(dO, m, done, query, slot, at)


@T.macro
def multiply_keys(m, done, s, i):
    T.barrier_wait(done.q[i % STAGES], i // STAGES & 1)
    T.wgmma_gemm(m.k, m.q[i % STAGES, :, :], s, transpose_B=True, clear_accum=True, policy=BY_ROWS)


@T.macro
def multiply_gradients(m, done, p, dv, i):
    T.barrier_wait(done.do[i % STAGES], i // STAGES & 1)
    T.wgmma_gemm(p, m.do[i % STAGES, :, :], dv, policy=BY_ROWS)


@T.macro
def consume(BitsT, Tiles, dKV, m, done, at, dims, scale, tx):
    s = T.alloc_fragment([KEYS, QUERIES], "float32")
    p = T.alloc_fragment([KEYS, QUERIES], "bfloat16")
    dv = T.alloc_fragment([KEYS, dims.v], "float32")
    words, tile = T.alloc_local([2], "uint32"), T.alloc_local([1], "int32")
    numbers, computed = (T.alloc_local([1], "int32") for _ in range(2))
    numbers[0] = shared_address(m.numbers[0, 0, 0])
    computed[0] = shared_address(done.computed[0])
    T.clear(dv)
    T.barrier_wait(done.k[0], 0)
    if at.n > 0:
        tile[0] = Tiles[at.block, 0]
        read_bits(BitsT, words, tile[0], at, tx)
        multiply_keys(m, done, s, 0)
        if at.n > 1:
            tile[0] = Tiles[at.block, 1]
        T.wait_wgmma(0)
        probabilities(s, numbers[0], words, scale)
        T.barrier_arrive(done.q_free[0])
        T.copy(s, p)
        for i in T.serial(1, at.n):
            read_bits(BitsT, words, tile[0], at, tx)
            multiply_keys(m, done, s, i)
            multiply_gradients(m, done, p, dv, i - 1)
            if i + 1 < at.n:
                tile[0] = Tiles[at.block, i + 1]
            T.wait_wgmma(1)
            probabilities(s, numbers[0] + i % STAGES * (2 * NUMBERS), words, scale)
            T.barrier_arrive(done.q_free[i % STAGES])
            call("dsa_computed", computed[0], s.data, of=(QUERIES // 8,))
            T.wait_wgmma(0)
            T.barrier_arrive(done.do_free[(i - 1) % STAGES])
            T.copy(s, p)
        multiply_gradients(m, done, p, dv, at.n - 1)
        T.wait_wgmma(0)
    # Gradients overwrite the keys in shared memory, including their rope dims.
    T.sync_threads(3, 2 * GROUP)
    T.copy(dv, m.k)
    T.sync_threads(3, 2 * GROUP)
    write_columns(dKV, m.k, dims.v, dims.nope, at, tx)


def build(nope: int, rope: int, v: int):
    """Return the TileLang program, which writes only the value gradients to dKV."""
    dims = Dims(nope, rope, v)
    if not dims.tiling.split or dims.qk != v:
        raise ValueError(
            f"the backward of dims {(nope, rope, v)} gives dV with the other gradients: use it"
        )
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    queries, keys, heads = T.dynamic("queries, keys, heads")
    padded, count, groups, blocks, width = T.dynamic("padded, count, groups, blocks, width")

    @T.prim_func
    def masked_attention_value_gradient(
        Q: T.Tensor([queries, heads, nope + rope], bf16),
        KV: T.Tensor([keys, heads, nope + v], bf16),
        Kpe: T.Tensor([keys, rope] if rope else [1, 1], bf16),
        dO: T.Tensor([queries, heads, v], bf16),
        Numbers: T.Tensor([heads, 2, count], fp32),
        BitsT: T.Tensor([padded, groups, 4], int32),
        Tiles: T.Tensor([blocks, width], int32),
        Count: T.Tensor([blocks], int32),
        dKV: T.Tensor([keys, heads, nope + v], bf16),
        scale: T.float32,
        together: T.int32,
    ):
        with T.Kernel(blocks * heads, threads=THREADS) as number:
            T.import_source(SOURCE + COMPUTED + BLOCK_WORK_SOURCE)
            m = SimpleNamespace(
                k=T.alloc_shared([KEYS, nope + rope], bf16),
                q=T.alloc_shared([STAGES, QUERIES, nope + rope], bf16),
                do=T.alloc_shared([STAGES, QUERIES, v], bf16),
                numbers=T.alloc_shared([STAGES, 2, QUERIES], fp32),
            )
            done = SimpleNamespace(
                k=T.alloc_barrier(arrive_count=[32]),
                q=T.alloc_barrier(arrive_count=[32] * STAGES),
                do=T.alloc_barrier(arrive_count=[32] * STAGES),
                q_free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
                do_free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
                computed=T.alloc_barrier(arrive_count=[2 * GROUP]),
            )
            tx = T.get_thread_binding()
            at = block_work(Count, number, heads, together, KEYS, False)
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[1], 0)
                if tx < 2 * GROUP + 32:
                    produce(Q, KV, Kpe, dO, Numbers, Tiles, m, done, at, dims)
            else:
                T.set_max_nreg(REGISTERS[0], 1)
                consume(BitsT, Tiles, dKV, m, done, at, dims, scale, tx)

    return masked_attention_value_gradient


compiled = compiler(build, PASSES)
