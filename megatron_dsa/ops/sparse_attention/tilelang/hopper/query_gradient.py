"""First half of the backward for many heads: P, dS and dQ of 64 query heads (sm_90a).

The warpgroups S, DP and GATHER work as in :mod:`.backward`, but P and dS are stored in global
memory for :mod:`.key_gradient`, and GATHER refills a buffer in quarters.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import NO_HOISTING, call, shared_address
from megatron_dsa.ops.hopper.programs import MANUAL_BARRIERS, compiler
from megatron_dsa.ops.hopper.tiles import (
    COPIED_KEYS,
    GROUP,
    HALF,
    LOG2_E,
    QUARTER,
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
from megatron_dsa.ops.sparse_attention.tilelang.hopper.reduction import SOURCE as REDUCTION

#: Registers per thread of the warpgroups S, DP and GATHER.
REGISTERS = {576: (208, 232, 64), 512: (208, 224, 72)}
BYTES = TILE * TILE * 2

SOURCE = r"""
// One thread starts a copy of a tile to global memory, evicted first: it is read once, much later.
__device__ __forceinline__ void dsa_store_tile(long long target, int tile, int bytes) {
  asm volatile(
    "{\n"
    ".reg .b64 policy;\n"
    "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
    "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy;\n"
    "cp.async.bulk.commit_group;\n"
    "}" :: "l"(target), "r"(tile), "r"(bytes) : "memory");
}
// Waits until this thread's copies have read their tile, or are complete.
__device__ __forceinline__ void dsa_tile_is_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void dsa_tiles_are_stored() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ long long dsa_global(const void* what) {
  return reinterpret_cast<long long>(what);
}
"""


def key_parts(dim: int) -> tuple[tuple[int, int], ...]:
    return (HALF, HALF + QUARTER), (0, QUARTER), (HALF + QUARTER, dim), (QUARTER, HALF)


@T.macro
def gather(KV, Ids, m, done, at, dim, thread):
    ids = T.alloc_local([TILE // COPIED_KEYS], "int32")
    ahead = T.alloc_local([1], "int32")
    unused = T.alloc_local([1], "uint8")
    lists = Lists(KV, Ids, None, 1, ahead, unused, ids)
    list_ahead(lists, at, 0, TILE, thread)
    for i in T.serial(at.blocks()):
        queries.next_ids(lists, m, at, i, thread)
        for part in (0, 1, 2, 3):
            T.barrier_wait(done.keys_free[part], (i & 1) ^ 1)
            queries.fetch_part(lists, m, done, part, key_parts(dim)[part], thread)


@T.macro
def store(i, barrier, target, tile, thread):
    if thread < 32:
        T.barrier_wait(barrier, i & 1)
        if thread == 0:
            call("dsa_store_tile", target, tile, BYTES)


@T.macro
def scores(dQ, PSum, PdS, m, done, at, shape, scale, thread):
    s = T.alloc_fragment([TILE, TILE], "float32")
    dq = queries.left_columns()
    here = T.alloc_local([3], "int32")
    target = T.alloc_local([1], "int64")
    here[0] = shared_address(m.p[0, 0])
    here[1] = call("dsa_place", here[0], thread, returns="int32")
    here[2] = shared_address(m.ds[0, 0])
    here[2] = call("dsa_place", here[2], thread, returns="int32")
    target[0] = call("dsa_global", T.address_of(PdS[at.list, 0, at.rank, 0, 0, 0]), returns="int64")
    lse = T.alloc_local([TILE // 4], "float32")
    for r in T.unroll(TILE // 4):
        lse[r] = m.lse[r // 2 * 8 + thread % 4 * 2 + r % 2]
    T.barrier_wait(done.queries, 0)
    for i in T.serial(at.blocks()):
        for n, (left, right) in enumerate(key_parts(shape.dim)):
            T.barrier_wait(done.keys[n], i & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(
                m.k[:, left:right], m.q[:, left:right], s, transpose_B=True, clear_accum=n == 0
            )
        T.barrier_arrive(done.s_issued)
        T.wait_wgmma(0)
        # Wait until the copy to global memory has read the old P.
        if thread == 0:
            call("dsa_tile_is_read")
        T.sync_threads(9, GROUP)
        for side in (0, 1):
            call("dsa_probabilities", s.data, lse.data, scale * LOG2_E, of=(side,))
            call("dsa_store_half", s.data, here[1], of=(side,))
            call("dsa_store_p", s.data, here[2], of=(side,))
            T.barrier_arrive(done.p[side])
        T.fence_proxy_async()
        T.barrier_arrive(done.p_stored)
        store(i, done.p_stored, target[0], here[0], thread)
        target[0] += shape.tiles * 2 * BYTES
        if PSum is not None:
            queries.sum_heads(PSum, s, at, i, shape, thread)
        T.barrier_wait(done.ds, i & 1)
        # Waiting lets warpgroup DP's first product free its keys early.
        T.barrier_wait(done.keys_free[0], i & 1)
        queries.add_keys(m, dq)
        T.wait_wgmma(1)
        T.barrier_arrive(done.keys_free[1])
        T.wait_wgmma(0)
        T.barrier_arrive(done.keys_free[3])
    # Other warpgroups have finished reading the key columns that receive dQ.
    T.sync_threads(9, GROUP)
    queries.write_columns(dQ, m, dq, at, 9)
    call("dsa_tiles_are_stored")


@T.macro
def score_gradients(dQ, PdS, m, done, at, shape, scale, thread):
    dp = T.alloc_fragment([TILE, TILE], "float32")
    dq = queries.right_columns(shape.dim)
    here = T.alloc_local([3], "int32")
    here[2] = shared_address(m.delta[0]) + thread % 4 * 8
    target = T.alloc_local([1], "int64")
    here[0] = shared_address(m.ds[0, 0])
    here[1] = call("dsa_place", here[0], thread, returns="int32")
    target[0] = call("dsa_global", T.address_of(PdS[at.list, 0, at.rank, 1, 0, 0]), returns="int64")
    T.barrier_wait(done.queries, 0)
    for i in T.serial(at.blocks()):
        for n, (left, right) in enumerate(key_parts(V_DIM)):
            T.barrier_wait(done.keys[n], i & 1)
            if n == 3:
                T.barrier_wait(done.s_issued, i & 1)
            T.fence_proxy_async()
            T.wgmma_gemm(
                m.k[:, left:right], m.do[:, left:right], dp, transpose_B=True, clear_accum=n == 0
            )
        T.wait_wgmma(0)
        call("dsa_less_delta", dp.data, here[2], scale * P_UNIT)
        for side in (0, 1):
            T.barrier_wait(done.p[side], i & 1)
            call("dsa_times_p", dp.data, here[1], of=(side,))
        T.fence_proxy_async()
        T.barrier_arrive(done.ds)
        # The dQ product reads the dS of all warps.
        T.barrier_wait(done.ds, i & 1)
        queries.add_keys(m, dq)
        store(i, done.ds, target[0], here[0], thread)
        target[0] += shape.tiles * 2 * BYTES
        T.wait_wgmma(len(dq) - 1)
        T.barrier_arrive(done.keys_free[0])
        T.wait_wgmma(0)
        # Warpgroup S overwrites dS, so the copy to global memory must have read dS.
        if thread == 0:
            call("dsa_tile_is_read")
        T.barrier_arrive(done.keys_free[2])
    T.sync_threads(10, GROUP)
    queries.write_columns(dQ, m, dq, at, 10)
    call("dsa_tiles_are_stored")


def build(heads: int, dim: int, v_dim: int, p_sum: bool = False):
    """Return the TileLang program; for arguments see :func:`.backward.build`.

    PdS: bf16 ``[lists, ceil(W / 64), tiles, 2, 64 keys, 64 heads]``, P and dS of blocks within
    Length, swizzled like shared memory: 16-byte chunk ``c`` of key ``k`` is at ``c ^ k % 8``.
    """
    shape = Shape(heads, dim, v_dim)
    for_s, for_dp, for_gather = REGISTERS[dim]
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width, most = T.dynamic("rows, keys, lists, width, most")

    @T.prim_func
    def sparse_mla_query_gradient(
        Q: T.Tensor([rows, dim], bf16),
        KV: T.Tensor([keys, dim], bf16),
        O: T.Tensor([rows, v_dim], bf16),  # noqa: E741
        dO: T.Tensor([rows, v_dim], bf16),
        Lse: T.Tensor([rows], fp32),
        Ids: T.Tensor([lists, width], int32),
        Length: T.Tensor([lists], int32),
        dQ: T.Tensor([rows, dim], bf16),
        PdS: T.Tensor([lists, most, shape.tiles, 2, TILE, TILE], bf16),
        Delta: T.Tensor([rows], fp32),
        PSum: T.Tensor([lists, 1, width] if p_sum else [1, 1, 1], fp32),
        scale: T.float32,
    ):
        with T.Kernel(lists * shape.tiles, threads=3 * GROUP) as block:
            T.import_source(NO_HOISTING + REDUCTION + ACCUMULATORS + SOURCE)
            m = queries.tile_memory(dim, with_members=False)
            done = SimpleNamespace(
                queries=T.alloc_barrier(arrive_count=2 * GROUP),
                keys=T.alloc_barrier(arrive_count=[2 * GROUP] * 4),
                keys_free=T.alloc_barrier(arrive_count=[GROUP] * 4),
                p=T.alloc_barrier(arrive_count=[GROUP, GROUP]),
                p_stored=T.alloc_barrier(arrive_count=GROUP),
                s_issued=T.alloc_barrier(arrive_count=GROUP),
                ds=T.alloc_barrier(arrive_count=GROUP),
            )
            tx = T.get_thread_binding()
            thread = tx % GROUP
            at = block_work(block, Length, rows, shape)
            queries.start(Q, O, dO, Lse, Delta, m, done, at, dim, scale, tx)
            if tx >= 2 * GROUP:
                T.set_max_nreg(for_gather, 0)
                gather(KV, Ids, m, done, at, dim, thread)
            elif tx < GROUP:
                T.set_max_nreg(for_s, 1)
                scores(dQ, PSum if p_sum else None, PdS, m, done, at, shape, scale, thread)
            else:
                T.set_max_nreg(for_dp, 1)
                score_gradients(dQ, PdS, m, done, at, shape, scale, thread)
            call("dsa_keep", T.address_of(m.p[0, 0]), T.address_of(m.ds[0, 0]))

    return sparse_mla_query_gradient


compiled = compiler(build, MANUAL_BARRIERS)
