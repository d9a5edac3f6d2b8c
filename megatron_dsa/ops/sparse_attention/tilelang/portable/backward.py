"""Backward of sparse attention with ``mma.sync``, for sm_80 and newer.

Vector atomics need sm_90, so dKV is transposed: eight threads hold eight neighbouring columns of a
key, a whole memory sector.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import PORTABLE, compiler
from megatron_dsa.ops.hopper.tiles import LOG2_E, SLAB, V_DIM, Lists, Shape, block_work, fetch_tile
from megatron_dsa.ops.sparse_attention.tilelang.portable.tiles import (
    BACKWARD,
    check_memory,
    gather,
    gather_first,
    gather_next,
    key_memory,
    tiling_of,
)
from megatron_dsa.ops.sparse_attention.tilelang.softmax import read_lse

FULL_ROW, FULL_COL = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.FullCol

CHUNK = 128

SOURCE = r"""
// Fixed-point value; `units`, a power of two, is the scale.
__device__ __forceinline__ long long dsa_fixed(float value, float units) {
  return __float2ll_rn(value * units);
}
"""


@T.macro
def row_factors(O, Lse, Delta, m, at, tile, thread):  # noqa: E741
    o = T.alloc_fragment([tile, SLAB], "bfloat16")
    products = T.alloc_fragment([tile, SLAB], "float32")
    delta = T.alloc_fragment([tile], "float32")
    T.clear(products)
    for u in T.serial(V_DIM // SLAB):
        for r, c in T.Parallel(tile, SLAB):
            o[r, c] = T.if_then_else(
                r < at.rows, O[at.first + r, u * SLAB + c], T.cast(0, "bfloat16")
            )
        for r, c in T.Parallel(tile, SLAB):
            products[r, c] += T.cast(o[r, c], "float32") * T.cast(m.do[r, u * SLAB + c], "float32")
    T.reduce_sum(products, delta, dim=1)
    T.copy(delta, m.delta)
    for r in T.Parallel(tile):
        if r < at.rows:
            Delta[at.first + r] = delta[r]
    read_lse(Lse, m, at, tile, thread)


@T.macro
def probabilities(s, dp, m, at_key, shape, scale):
    for r, k in T.Parallel(s.shape[0], s.shape[1]):
        query = T.cast(T.min(r // shape.heads, shape.group - 1), "uint8")
        s[r, k] = T.if_then_else(
            (m.members[at_key + k] >> query & 1) != 0,
            T.exp2(s[r, k] * (scale * LOG2_E) - m.lse[r]),
            0.0,
        )
    for r, k in T.Parallel(s.shape[0], s.shape[1]):
        dp[r, k] = s[r, k] * (dp[r, k] - m.delta[r]) * scale
    T.copy(s, m.p)
    T.copy(dp, m.ds)


@T.macro
def head_sums(PSum, s, m, at, i, shape, thread):
    block_keys = s.shape[1]
    part = T.alloc_fragment([shape.tile, block_keys], "float32")
    sums = T.alloc_fragment([block_keys], "float32")
    for g in tuple(range(shape.group)):
        for r, k in T.Parallel(shape.tile, block_keys):
            part[r, k] = T.if_then_else(r // shape.heads == g or shape.group == 1, s[r, k], 0.0)
        T.reduce_sum(part, sums, dim=0)
        T.sync_threads()
        T.copy(sums, m.sums)
        T.sync_threads()
        if thread < block_keys and i * block_keys + thread < at.n:
            if shape.tiles > 1:
                T.atomic_add(PSum[at.list, g, i * block_keys + thread], m.sums[thread])
            else:
                PSum[at.list, g, i * block_keys + thread] = m.sums[thread]


@T.macro
def key_gradient(dKV, m, at_key, columns, units):
    first, count, block_keys = columns.start, columns.stop - columns.start, m.p.shape[1]
    dkv = T.alloc_fragment([count, block_keys], "float32")
    ids = T.alloc_fragment([block_keys], "int32")
    T.gemm(m.q[:, columns], m.ds, dkv, transpose_A=True, clear_accum=True, policy=FULL_ROW)
    if first < V_DIM:
        T.gemm(m.do[:, columns], m.p, dkv, transpose_A=True, policy=FULL_ROW)
    for k in T.Parallel(block_keys):
        ids[k] = m.ids[at_key + k]
    for c, k in T.Parallel(count, block_keys):
        if ids[k] >= 0:
            share = dkv[c, k]
            if units is not None:
                share = call("dsa_fixed", share, units[0], returns="int64")
            T.atomic_add(dKV[ids[k], first + c], share)


def build(
    heads: int,
    dim: int,
    v_dim: int,
    group: int = 1,
    fixed_point: bool = False,
    p_sum: bool = False,
    tiles: str = "sm_80",
):
    """Return the TileLang program; for arguments see :func:`..hopper.backward.build`.

    dKV is in column order.
    """
    tiling = tiling_of(BACKWARD, tiles)
    shape = Shape(heads, dim, v_dim, group, tiling.rows)
    tile, block_keys, stages, tail = tiling.rows, tiling.keys, tiling.stages, shape.tail
    needed = key_memory(tiling, dim) + 2 * tile * (dim + v_dim + 2 * block_keys) + 4 * 2 * tile
    check_memory(needed + (4 * block_keys if p_sum else 0), tiles)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width = T.dynamic("rows, keys, lists, width")
    to_scores = {"transpose_B": True, "clear_accum": True, "policy": FULL_ROW}

    @T.prim_func
    def portable_mla_backward(
        Q: T.Tensor([rows, dim], bf16),
        KV: T.Tensor([keys, dim], bf16),
        O: T.Tensor([rows, v_dim], bf16),  # noqa: E741
        dO: T.Tensor([rows, v_dim], bf16),
        Lse: T.Tensor([rows], fp32),
        Ids: T.Tensor([lists, width], int32),
        Members: T.Tensor([lists, width] if group > 1 else [1, 1], "uint8"),
        Length: T.Tensor([lists], int32),
        dQ: T.Tensor([rows, dim], bf16),
        dKV: T.Tensor([keys, dim], "int64" if fixed_point else fp32),
        Units: T.Tensor([1], fp32),
        Delta: T.Tensor([rows], fp32),
        PSum: T.Tensor([lists, group, width] if p_sum else [1, 1, 1], fp32),
        scale: T.float32,
    ):
        with T.Kernel(lists * shape.tiles, threads=tiling.threads) as block:
            T.import_source(SOURCE)
            m = SimpleNamespace(
                q=T.alloc_shared([tile, dim], bf16),
                do=T.alloc_shared([tile, v_dim], bf16),
                k=T.alloc_shared([stages * block_keys, dim], bf16),
                p=T.alloc_shared([tile, block_keys], bf16),
                ds=T.alloc_shared([tile, block_keys], bf16),
                lse=T.alloc_shared([tile], fp32),
                delta=T.alloc_shared([tile], fp32),
                ids=T.alloc_shared([stages * block_keys], int32),
                members=T.alloc_shared([stages * block_keys], "uint8"),
                sums=T.alloc_shared([block_keys], fp32) if p_sum else None,
            )
            s = T.alloc_fragment([tile, block_keys], fp32)
            dp = T.alloc_fragment([tile, block_keys], fp32)
            dq = T.alloc_fragment([tile, v_dim], fp32)
            T.clear(dq)
            if tail:
                dq_tail = T.alloc_fragment([tile, tail], fp32)
                T.clear(dq_tail)
            ahead = T.alloc_local([block_keys // tiling.copied], int32)
            members = T.alloc_local([block_keys // tiling.copied], "uint8")
            units = T.alloc_local([1], fp32)
            if fixed_point:
                units[0] = Units[0]
            source = Lists(KV, Ids, Members, group, ahead, members)
            thread = T.get_thread_binding()
            at = block_work(block, Length, rows, shape)
            fetch_tile([(m.q, Q, (0, dim))], at, tile, tiling.threads, thread)
            fetch_tile([(m.do, dO, (0, v_dim))], at, tile, tiling.threads, thread)
            T.ptx_commit_group()
            gather_first(source, m, at, tiling, thread)
            T.ptx_wait_group(stages - 1)
            T.sync_threads()
            row_factors(O, Lse, Delta, m, at, tile, thread)
            for i in T.serial(at.blocks(block_keys)):
                if stages == 1:
                    T.sync_threads()
                    gather(source, m, at, i, tiling, thread)
                    T.ptx_commit_group()
                T.ptx_wait_group(max(stages - 2, 0))
                T.sync_threads()
                if stages > 1:
                    gather_next(source, m, at, i + stages - 1, tiling, thread)
                at_key = i % stages * block_keys
                block_of_keys = slice(at_key, at_key + block_keys)
                T.gemm(m.q, m.k[block_of_keys, :], s, **to_scores)
                T.gemm(m.do, m.k[block_of_keys, :v_dim], dp, **to_scores)
                probabilities(s, dp, m, at_key, shape, scale)
                if p_sum:
                    head_sums(PSum, s, m, at, i, shape, thread)
                T.sync_threads()
                for first in tuple(range(0, dim, CHUNK)):
                    columns = slice(first, min(first + CHUNK, dim))
                    key_gradient(dKV, m, at_key, columns, units if fixed_point else None)
                T.gemm(m.ds, m.k[block_of_keys, :v_dim], dq, policy=FULL_COL)
                if tail:
                    T.gemm(m.ds, m.k[block_of_keys, v_dim:], dq_tail, policy=FULL_COL)
            # Without keys, no loop iteration has synchronised the threads.
            T.sync_threads()
            T.copy(dq, m.q[:, :v_dim])
            if tail:
                T.copy(dq_tail, m.q[:, v_dim:])
            T.sync_threads()
            for r, c in T.Parallel(tile, dim):
                if r < at.rows:
                    dQ[at.first + r, c] = m.q[r, c]

    return portable_mla_backward


compiled = compiler(build, PORTABLE)
