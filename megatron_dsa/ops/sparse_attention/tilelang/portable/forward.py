"""Forward of sparse attention with ``mma.sync``, for sm_80 and newer.

Warps split the query heads for S and the value columns for O, so that each value is read once. P
and the scaling factors pass through shared memory.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.programs import PORTABLE, compiler
from megatron_dsa.ops.hopper.tiles import LOG2_E, Lists, Shape, block_work, fetch_tile
from megatron_dsa.ops.sparse_attention.tilelang.portable.tiles import (
    FORWARD,
    check_memory,
    gather_first,
    gather_next,
    key_memory,
    tiling_of,
)
from megatron_dsa.ops.sparse_attention.tilelang.softmax import (
    LOWEST,
    divisors,
    raise_top,
    write_lse,
)


@T.macro
def probabilities(s, m, at_key, top, sums, peak, factor, shape, scale):
    for r, k in T.Parallel(s.shape[0], s.shape[1]):
        query = T.min(r // shape.heads, shape.group - 1)
        member = m.members[at_key + k] >> T.cast(query, "uint8")
        s[r, k] = T.if_then_else((member & 1) != 0, s[r, k], -T.infinity("float32"))
    T.reduce_max(s, peak, dim=1)
    raise_top(peak, top, factor, scale)
    for r, k in T.Parallel(s.shape[0], s.shape[1]):
        s[r, k] = T.exp2(s[r, k] * (scale * LOG2_E) - top[r])
        sums[r, k] = sums[r, k] * factor[r] + s[r, k]
    T.copy(s, m.p)
    T.copy(factor, m.factor)
    T.sync_threads()


@T.macro
def scale_rows(o, m):
    for r, c in T.Parallel(o.shape[0], o.shape[1]):
        o[r, c] *= m.factor[r]


@T.macro
def finish(O, Lse, Sink, o, top, total, factor, m, at, shape):  # noqa: E741
    divisors(factor, Sink, top, total, at, shape)
    # Without keys, the copy of queries to O's buffer may be unfinished.
    T.ptx_wait_group(0)
    T.sync_threads()
    T.copy(factor, m.factor)
    T.sync_threads()
    scale_rows(o, m)
    T.copy(o, m.q[:, : shape.v_dim])
    T.sync_threads()
    for r, c in T.Parallel(shape.tile, shape.v_dim):
        if r < at.rows:
            O[at.first + r, c] = m.q[r, c]
    write_lse(Lse, top, total, at, shape)


def build(
    heads: int,
    dim: int,
    v_dim: int,
    group: int = 1,
    with_sink: bool = False,
    tiles: str = "sm_80",
):
    """Return the TileLang program; for arguments see :func:`..hopper.forward.build`."""
    tiling = tiling_of(FORWARD, tiles)
    shape = Shape(heads, dim, v_dim, group, tiling.rows)
    tile, block_keys, stages = tiling.rows, tiling.keys, tiling.stages
    needed = key_memory(tiling, dim) + 2 * tile * (dim + block_keys) + 4 * tile
    check_memory(needed, tiles)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width = T.dynamic("rows, keys, lists, width")

    @T.prim_func
    def portable_mla_forward(
        Q: T.Tensor([rows, dim], bf16),
        KV: T.Tensor([keys, dim], bf16),
        Ids: T.Tensor([lists, width], int32),
        Members: T.Tensor([lists, width] if group > 1 else [1, 1], "uint8"),
        Length: T.Tensor([lists], int32),
        Sink: T.Tensor([heads] if with_sink else [1], fp32),
        O: T.Tensor([rows, v_dim], bf16),  # noqa: E741
        Lse: T.Tensor([rows], fp32),
        scale: T.float32,
    ):
        with T.Kernel(lists * shape.tiles, threads=tiling.threads) as block:
            m = SimpleNamespace(
                q=T.alloc_shared([tile, dim], bf16),
                k=T.alloc_shared([stages * block_keys, dim], bf16),
                p=T.alloc_shared([tile, block_keys], bf16),
                factor=T.alloc_shared([tile], fp32),
                ids=None,
                members=T.alloc_shared([stages * block_keys], "uint8"),
            )
            s = T.alloc_fragment([tile, block_keys], fp32)
            o = T.alloc_fragment([tile, v_dim], fp32)
            peak = T.alloc_fragment([tile], fp32)
            top = T.alloc_fragment([tile], fp32)
            factor = T.alloc_fragment([tile], fp32)
            sums = T.alloc_fragment([tile, block_keys], fp32)
            total = T.alloc_fragment([tile], fp32)
            ahead = T.alloc_local([block_keys // tiling.copied], int32)
            members = T.alloc_local([block_keys // tiling.copied], "uint8")
            source = Lists(KV, Ids, Members, group, ahead, members)
            thread = T.get_thread_binding()
            at = block_work(block, Length, rows, shape)
            fetch_tile([(m.q, Q, (0, dim))], at, tile, tiling.threads, thread)
            gather_first(source, m, at, tiling, thread)
            T.clear(o)
            T.clear(sums)
            T.fill(top, LOWEST)
            for i in T.serial(at.blocks(block_keys)):
                # Key block i has arrived, and all threads have read key block i - 1.
                T.ptx_wait_group(stages - 2)
                T.sync_threads()
                gather_next(source, m, at, i + stages - 1, tiling, thread)
                at_key = i % stages * block_keys
                T.gemm(
                    m.q,
                    m.k[at_key : at_key + block_keys, :],
                    s,
                    transpose_B=True,
                    clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )
                probabilities(s, m, at_key, top, sums, peak, factor, shape, scale)
                scale_rows(o, m)
                T.gemm(
                    m.p,
                    m.k[at_key : at_key + block_keys, :v_dim],
                    o,
                    policy=T.GemmWarpPolicy.FullCol,
                )
            T.reduce_sum(sums, total, dim=1)
            finish(O, Lse, Sink if with_sink else None, o, top, total, factor, m, at, shape)

    return portable_mla_forward


compiled = compiler(build, PORTABLE)
