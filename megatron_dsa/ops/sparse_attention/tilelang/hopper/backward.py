"""Backward of sparse attention, 64 query heads per thread block (sm_90a).

Four warpgroups compute ``S = K Q^T``, ``dP = V dO^T``, ``P = exp(S - lse)``, ``dS = P (dP -
delta)``, ``dQ += dS^T K`` and ``dKV = dS Q + P dO`` for 64 gathered keys at a time, which fill
shared memory:

* ``S``: scores, P, and the left half of dQ's columns;
* ``DP``: dP, dS, and the rest of dQ;
* ``KV``: dKV, 64 columns at a time, added to global memory from registers; without rope it also
  holds P and dS in registers, so that ``S`` need not wait for its products;
* ``GATHER``: fetches keys as soon as dQ has read half of the buffer.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import NO_HOISTING, call, shared_address
from megatron_dsa.ops.hopper.programs import FAST_MATH, compiler
from megatron_dsa.ops.hopper.tiles import (
    COPIED_KEYS,
    GROUP,
    HALF,
    LOG2_E,
    SLAB,
    TILE,
    V_DIM,
    Lists,
    Shape,
    block_work,
    list_ahead,
)
from megatron_dsa.ops.sparse_attention.tilelang.hopper import queries
from megatron_dsa.ops.sparse_attention.tilelang.hopper.accumulators import P_UNIT
from megatron_dsa.ops.sparse_attention.tilelang.hopper.accumulators import SOURCE as ACCUMULATORS
from megatron_dsa.ops.sparse_attention.tilelang.hopper.reduction import SOURCE

#: Registers per thread of the warpgroups S, DP, KV and GATHER.
REGISTERS = {576: (192, 224, 64, 32), 512: (192, 192, 96, 32)}


@T.macro
def gather(KV, Ids, Members, m, done, at, shape, thread):
    ids = T.alloc_local([TILE // COPIED_KEYS], "int32")
    ahead = T.alloc_local([1], "int32")
    members = T.alloc_local([1], "uint8")
    lists = Lists(KV, Ids, Members, shape.group, ahead, members, ids)
    list_ahead(lists, at, 0, TILE, thread)
    for i in T.serial(at.blocks()):
        for side in (0, 1):
            T.barrier_wait(done.keys_free[side], (i & 1) ^ 1)
            if side == 0:
                # Warpgroup KV has read the key ids of block i - 2.
                queries.next_ids(lists, m, at, i, thread)
            columns = ((0, HALF), (HALF, shape.dim))[side]
            queries.fetch_part(lists, m, done, side, columns, thread)


@T.macro
def key_gradient(dKV, Units, m, done, at, thread):
    dkv = T.alloc_fragment([TILE, SLAB], "float32")
    target = T.alloc_local([2], "int64")
    units = T.alloc_local([1], "float32")
    fixed, dim = Units is not None, dKV.shape[1]
    in_registers = dim == V_DIM
    operands, here = (m.p, m.ds), None
    if in_registers:
        operands = tuple(T.alloc_fragment([TILE, TILE], "bfloat16") for _ in range(2))
        here = queries.swizzled_addresses(m, thread)
    if fixed:
        units[0] = Units[0]
    for i in T.serial(at.blocks()):
        T.barrier_wait(done.p, i & 1)
        for r in T.unroll(2):
            target[r] = call(
                "dsa_row",
                T.address_of(dKV[0, 0]),
                m.ids[i % 2, thread // 32 * 16 + r * 8 + thread % 32 // 4],
                dim,
                thread % 4 * (1 if fixed else 4),
                returns="int64",
            )
        for first in tuple(range(0, dim, SLAB)):
            slab = slice(first, first + SLAB)
            if first == 0 and in_registers:
                call("dsa_load_tile", operands[0].data, here[0])
            if first < V_DIM:
                T.wgmma_gemm(operands[0], m.do[:, slab], dkv, clear_accum=True)
            if first == 0:
                T.barrier_wait(done.ds, i & 1)
                if in_registers:
                    call("dsa_load_tile", operands[1].data, here[1])
                    T.barrier_arrive(done.p_free)
            T.wgmma_gemm(operands[1], m.q[:, slab], dkv, clear_accum=first >= V_DIM)
            T.wait_wgmma(0)
            if first + SLAB == dim and not in_registers:
                T.barrier_arrive(done.p_free)
            of = (SLAB, first)
            if fixed:
                call("dsa_add_fixed_rows", dkv.data, target[0], target[1], units[0], of=of)
            else:
                call("dsa_add_rows", dkv.data, target[0], target[1], of=of)


@T.macro
def exponentials(s, m, i, members, shape, scale):
    if shape.group > 1:
        for k in T.Parallel(TILE):
            members[k] = m.members[i % 2, k]
    T.wait_wgmma(0)
    for part in tuple(range(0, TILE, 16)):
        for k, h in T.Parallel(TILE, 16):
            # Invalid entries may have any finite P: dQ multiplies by a zero key, and dKV skips
            # the entries.
            s[k, part + h] = T.exp2(T.min(s[k, part + h] * (scale * LOG2_E) - m.lse[part + h], 1.0))
            if shape.group > 1:
                member = members[k] >> T.cast((part + h) // shape.heads, "uint8") & 1
                s[k, part + h] = T.if_then_else(member != 0, s[k, part + h], 0.0)
        call("dsa_no_hoisting")


@T.macro
def scores(dQ, PSum, m, done, at, shape, scale, thread):
    s = T.alloc_fragment([TILE, TILE], "float32")
    dq = queries.left_columns()
    here = queries.swizzled_addresses(m, thread)
    if shape.group > 1:
        members = T.alloc_fragment([TILE], "uint8")
    T.barrier_wait(done.queries, 0)
    for i in T.serial(at.blocks()):
        T.barrier_wait(done.keys[0], i & 1)
        T.wgmma_gemm(m.k[:, :HALF], m.q[:, :HALF], s, transpose_B=True, clear_accum=True)
        T.barrier_wait(done.keys[1], i & 1)
        T.wgmma_gemm(m.k[:, HALF:], m.q[:, HALF:], s, transpose_B=True)
        exponentials(s, m, i, members if shape.group > 1 else None, shape, scale)
        if PSum is not None:
            queries.sum_heads(PSum, s, at, i, shape, thread)
        # Wait until other warpgroups have read the old P and dS.
        T.barrier_wait(done.p_free, (i & 1) ^ 1)
        for side in (0, 1):
            call("dsa_store_half", s.data, here[0], of=(side,))
            call("dsa_store_p", s.data, here[1], of=(side,))
        T.fence_proxy_async()
        T.barrier_arrive(done.p)
        T.barrier_wait(done.ds, i & 1)
        queries.add_keys(m, dq)
        T.wait_wgmma(0)
        T.barrier_arrive(done.keys_free[0])
    # Other warpgroups have finished reading the key columns that receive dQ.
    queries.write_columns(dQ, m, dq, at, 9)


@T.macro
def score_gradients(dQ, m, done, at, dim, scale, thread):
    dp = T.alloc_fragment([TILE, TILE], "float32")
    dq = queries.right_columns(dim)
    here = T.alloc_local([2], "int32")
    here[0] = shared_address(m.ds[0, 0])
    here[0] = call("dsa_place", here[0], thread, returns="int32")
    here[1] = shared_address(m.delta[0]) + thread % 4 * 8
    T.barrier_wait(done.queries, 0)
    for i in T.serial(at.blocks()):
        T.barrier_wait(done.keys[0], i & 1)
        T.wgmma_gemm(m.k[:, :HALF], m.do[:, :HALF], dp, transpose_B=True, clear_accum=True)
        T.barrier_wait(done.keys[1], i & 1)
        T.wgmma_gemm(m.k[:, HALF:V_DIM], m.do[:, HALF:], dp, transpose_B=True)
        T.wait_wgmma(0)
        call("dsa_less_delta", dp.data, here[1], scale * P_UNIT)
        T.barrier_wait(done.p, i & 1)
        for side in (0, 1):
            call("dsa_times_p", dp.data, here[0], of=(side,))
        T.fence_proxy_async()
        T.barrier_arrive(done.ds)
        # The dQ product reads the dS of all warps.
        T.barrier_wait(done.ds, i & 1)
        queries.add_keys(m, dq)
        T.wait_wgmma(0)
        T.barrier_arrive(done.keys_free[1])
    queries.write_columns(dQ, m, dq, at, 10)


def build(
    heads: int, dim: int, v_dim: int, group: int = 1, fixed_point: bool = False, p_sum: bool = False
):
    """Return the TileLang program for ``heads`` query heads of ``dim`` dims.

    A thread block has 64 heads of one query, or all heads of ``group`` adjacent queries over the
    union of their lists (:mod:`.unions`).

    Arguments are contiguous. Lse: natural log, ``-inf`` without keys. Members: bit ``g`` is set if
    query ``g`` selected the key (``group`` > 1). Length: within ``[0, W]``. dKV: zeroed, in
    accumulator order. Units: fixed-point scale. Delta: ``rowsum(dO * O)``. PSum: zeroed, undefined
    at invalid entries.
    """
    shape = Shape(heads, dim, v_dim, group)
    for_s, for_dp, for_kv, for_gather = REGISTERS[dim]
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width = T.dynamic("rows, keys, lists, width")

    @T.prim_func
    def sparse_mla_backward(
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
        with T.Kernel(lists * shape.tiles, threads=4 * GROUP) as block:
            T.import_source(NO_HOISTING + SOURCE + ACCUMULATORS)
            m = queries.tile_memory(dim, with_members=True)
            # Barriers count arriving copies and threads.
            done = SimpleNamespace(
                queries=T.alloc_barrier(arrive_count=2 * GROUP),
                keys=T.alloc_barrier(arrive_count=[2 * GROUP, 2 * GROUP]),
                keys_free=T.alloc_barrier(arrive_count=[GROUP, GROUP]),
                p=T.alloc_barrier(arrive_count=GROUP),
                ds=T.alloc_barrier(arrive_count=GROUP),
                p_free=T.alloc_barrier(arrive_count=GROUP),
            )
            tx = T.get_thread_binding()
            thread = tx % GROUP
            at = block_work(block, Length, rows, shape)
            queries.start(Q, O, dO, Lse, Delta, m, done, at, dim, scale, tx)
            if tx >= 3 * GROUP:
                T.set_max_nreg(for_gather, 0)
                gather(KV, Ids, Members, m, done, at, shape, thread)
            elif tx >= 2 * GROUP:
                T.set_max_nreg(for_kv, 0)
                key_gradient(dKV, Units if fixed_point else None, m, done, at, thread)
            elif tx < GROUP:
                T.set_max_nreg(for_s, 1)
                scores(dQ, PSum if p_sum else None, m, done, at, shape, scale, thread)
            else:
                T.set_max_nreg(for_dp, 1)
                score_gradients(dQ, m, done, at, dim, scale, thread)
            call("dsa_keep", T.address_of(m.p[0, 0]), T.address_of(m.ds[0, 0]))

    return sparse_mla_backward


compiled = compiler(build, FAST_MATH)
