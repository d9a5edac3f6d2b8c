"""Forward of sparse attention with ``mma.sync``, for sm_80 and newer.

A thread block holds a tile of query rows, and goes through the keys in blocks that arrive by
``cp.async`` while it works on those before (FlashAttention-2, algorithm 1, over gathered keys):
``S = Q K^T``, P by an online softmax, ``O += P V``. For S the warps divide the tile's rows, for O
its value columns, so that each value is read once; P and the factors cross through shared
memory.
"""

# No postponed annotations here: TileLang reads the tensors' shapes from them.
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.programs import PORTABLE, compiler
from megatron_dsa.ops.hopper.tiles import (
    LN_2,
    LOG2_E,
    check_tiling,
    head_tiles,
    tile_of,
)
from megatron_dsa.ops.sparse_attention.tilelang.portable.tiles import (
    FORWARD,
    check_memory,
    fetch_rows,
    gather,
    key_memory,
    look_ahead,
    tiling_of,
)

#: A maximum of no scores: finite, so that the exponent of a score that is not selected is -inf.
LOWEST = -1e30


def build(
    heads: int,
    dim: int,
    v_dim: int,
    group: int = 1,
    with_sink: bool = False,
    tiles: str = "sm_80",
):
    """Return the TileLang program for ``heads`` query heads of ``dim``, values of ``v_dim``.

    Its arguments are those of :func:`..hopper.forward.build`'s; ``tiles`` names the target whose
    :data:`.tiles.FORWARD` it uses.

    Raises:
        ValueError: dims that the tiling does not fit, or a group that does not fit in a tile.
    """
    tiling = tiling_of(FORWARD, tiles)
    check_tiling(heads, dim, v_dim, group, tiling.rows)
    tile, block_keys, stages = tiling.rows, tiling.keys, tiling.stages
    needed = key_memory(tiling, dim) + 2 * tile * (dim + block_keys) + 4 * tile
    check_memory(needed, tiles)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width = T.dynamic("rows, keys, lists, width")

    @T.macro
    def finish(O, Lse, Sink, o, top, total, factor, m, at):  # noqa: E741
        """Divide by the sum of P and write O and the lse."""
        for r in T.Parallel(tile):
            factor[r] = total[r]
            if with_sink:
                head = r % heads if group > 1 else T.min(at.head + r, heads - 1)
                factor[r] += T.exp2(Sink[head] * LOG2_E - top[r])
            factor[r] = T.if_then_else(total[r] == 0, 0.0, 1 / factor[r])
        # Without a block of keys the queries may still be arriving where O passes through.
        T.ptx_wait_group(0)
        T.sync_threads()
        T.copy(factor, m.factor)
        T.sync_threads()
        for r, c in T.Parallel(tile, v_dim):
            o[r, c] *= m.factor[r]
        T.copy(o, m.q[:, :v_dim])
        T.sync_threads()
        for r, c in T.Parallel(tile, v_dim):
            if r < at.rows:
                O[at.first + r, c] = m.q[r, c]
        for r in T.Parallel(tile):
            if r < at.rows:
                Lse[at.first + r] = T.if_then_else(
                    total[r] == 0, -T.infinity(fp32), (top[r] + T.log2(total[r])) * LN_2
                )

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
        """One thread block per tile of rows; arguments as :func:`build` describes."""
        with T.Kernel(lists * head_tiles(heads, tile), threads=tiling.threads) as block:
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
            # Of P, each thread's own columns: one sum over threads at the end is enough.
            sums = T.alloc_fragment([tile, block_keys], fp32)
            total = T.alloc_fragment([tile], fp32)
            ahead = T.alloc_local([block_keys // tiling.copied], int32)
            members = T.alloc_local([block_keys // tiling.copied], "uint8")
            thread = T.get_thread_binding()
            place, head, first, owned = tile_of(block, heads, group, rows, tile)
            n = Length[place]
            at = SimpleNamespace(list=place, head=head, first=first, rows=owned, n=n)
            blocks = T.ceildiv(n, block_keys)
            fetch_rows(m.q, Q, dim, at, tiling, rows, thread)
            look_ahead(Ids, Members, at, 0, tiling, group, ahead, members, thread)
            for i in tuple(range(stages - 1)):
                if i < blocks:
                    gather(KV, m, i, tiling, dim, keys, ahead, members, thread)
                    look_ahead(Ids, Members, at, i + 1, tiling, group, ahead, members, thread)
                T.ptx_commit_group()
            T.clear(o)
            T.clear(sums)
            T.fill(top, LOWEST)
            for i in T.serial(blocks):
                # Block i has come, and nobody reads block i - 1 any more.
                T.ptx_wait_group(stages - 2)
                T.sync_threads()
                if i + stages - 1 < blocks:
                    gather(KV, m, i + stages - 1, tiling, dim, keys, ahead, members, thread)
                    look_ahead(Ids, Members, at, i + stages, tiling, group, ahead, members, thread)
                T.ptx_commit_group()
                at_key = i % stages * block_keys
                T.gemm(
                    m.q,
                    m.k[at_key : at_key + block_keys, :],
                    s,
                    transpose_B=True,
                    clear_accum=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )
                for r, k in T.Parallel(tile, block_keys):
                    member = m.members[at_key + k] >> T.cast(T.min(r // heads, group - 1), "uint8")
                    s[r, k] = T.if_then_else((member & 1) != 0, s[r, k], -T.infinity(fp32))
                T.reduce_max(s, peak, dim=1)
                for r in T.Parallel(tile):
                    peak[r] = T.max(peak[r] * (scale * LOG2_E), top[r])
                    factor[r] = T.exp2(top[r] - peak[r])
                    top[r] = peak[r]
                for r, k in T.Parallel(tile, block_keys):
                    s[r, k] = T.exp2(s[r, k] * (scale * LOG2_E) - top[r])
                    sums[r, k] = sums[r, k] * factor[r] + s[r, k]
                T.copy(s, m.p)
                T.copy(factor, m.factor)
                T.sync_threads()
                for r, c in T.Parallel(tile, v_dim):
                    o[r, c] *= m.factor[r]
                T.gemm(
                    m.p,
                    m.k[at_key : at_key + block_keys, :v_dim],
                    o,
                    policy=T.GemmWarpPolicy.FullCol,
                )
            T.reduce_sum(sums, total, dim=1)
            finish(O, Lse, Sink, o, top, total, factor, m, at)

    return portable_mla_forward


compiled = compiler(build, PORTABLE)
