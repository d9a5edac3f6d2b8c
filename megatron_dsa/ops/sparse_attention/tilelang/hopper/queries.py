"""Macros that the Hopper backward kernels share."""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call, shared_address
from megatron_dsa.ops.hopper.tiles import (
    COPIED_KEYS,
    GROUP,
    HALF,
    QUARTER,
    TILE,
    V_DIM,
    fetch,
    fetch_tile,
    list_ahead,
)
from megatron_dsa.ops.sparse_attention.tilelang.hopper.accumulators import P_UNIT
from megatron_dsa.ops.sparse_attention.tilelang.softmax import read_lse


def tile_memory(dim: int, with_members: bool) -> SimpleNamespace:
    bf16, fp32 = "bfloat16", "float32"
    return SimpleNamespace(
        q=T.alloc_shared([TILE, dim], bf16),
        do=T.alloc_shared([TILE, V_DIM], bf16),
        k=T.alloc_shared([TILE, dim], bf16),
        p=T.alloc_shared([TILE, TILE], bf16),
        ds=T.alloc_shared([TILE, TILE], bf16),
        lse=T.alloc_shared([TILE], fp32),
        delta=T.alloc_shared([TILE], fp32),
        ids=T.alloc_shared([2, TILE], "int32"),
        members=T.alloc_shared([2, TILE], "uint8") if with_members else None,
    )


@T.macro
def start(Q, O, dO, Lse, Delta, m, done, at, dim, scale, tx):  # noqa: E741
    """Fetch Q and dO and compute delta with 256 threads.

    In shared memory, lse is in base 2, and delta is multiplied by the scale and P's unit.
    """
    if tx < 2 * GROUP:
        copies = ((m.q, Q, (0, dim)), (m.do, dO, (0, V_DIM)))
        fetch_tile(copies, at, TILE, 2 * GROUP, tx)
        T.cp_async_barrier_noinc(done.queries)
        delta = T.alloc_local([1], "float32")
        row = tx // 4
        delta[0] = 0.0
        if row < at.rows:
            arguments = (T.address_of(O[0, 0]), T.address_of(dO[0, 0]), at.first + row, tx % 4)
            delta[0] = call("dsa_row_product", *arguments, of=(V_DIM,), returns="float32")
        delta[0] += T.shfl_xor(delta[0], 1)
        delta[0] += T.shfl_xor(delta[0], 2)
        if tx % 4 == 0:
            m.delta[row] = delta[0] * (scale * P_UNIT)
            if row < at.rows:
                Delta[at.first + row] = delta[0]
    read_lse(Lse, m, at, TILE, tx)
    T.sync_threads()


@T.macro
def next_ids(lists, m, at, i, thread):
    if thread < TILE:
        m.ids[i % 2, thread] = T.if_then_else(
            lists.ahead[0] < lists.KV.shape[0], lists.ahead[0], -1
        )
        if lists.group > 1:
            m.members[i % 2, thread] = lists.members[0]
        list_ahead(lists, at, i + 1, TILE, thread)
    T.sync_threads(8, GROUP)
    for r in T.unroll(TILE // COPIED_KEYS):
        lists.ids[r] = m.ids[i % 2, r * COPIED_KEYS + thread // 8]


@T.macro
def fetch_part(lists, m, done, part, columns, thread):
    for r in tuple(range(TILE // COPIED_KEYS)):
        row = r * COPIED_KEYS + thread // 8
        from_row = T.max(lists.ids[r], 0)
        fetch(m.k, lists.KV, row, from_row, lists.ids[r] >= 0, columns, thread)
        call("dsa_no_hoisting")
    T.cp_async_barrier_noinc(done.keys[part])
    T.barrier_arrive(done.keys[part])


@T.macro
def swizzled_addresses(m, thread):
    """Return the shared-memory addresses at which this thread accesses P and dS."""
    here = T.alloc_local([2], "int32")
    here[0] = shared_address(m.p[0, 0])
    here[0] = call("dsa_place", here[0], thread, returns="int32")
    here[1] = shared_address(m.ds[0, 0])
    here[1] = call("dsa_place", here[1], thread, returns="int32")
    return here


@T.macro
def left_columns():
    """Return zeroed accumulators of dQ's left half, and their column ranges.

    Each holds a quarter: an instruction must not need more registers than a thread starts with.
    """
    dq_0 = T.alloc_fragment([TILE, QUARTER], "float32")
    dq_1 = T.alloc_fragment([TILE, QUARTER], "float32")
    T.clear(dq_0)
    T.clear(dq_1)
    return [(dq_0, slice(0, QUARTER)), (dq_1, slice(QUARTER, HALF))]


@T.macro
def right_columns(dim):
    dq_2 = T.alloc_fragment([TILE, QUARTER], "float32")
    dq_3 = T.alloc_fragment([TILE, QUARTER], "float32")
    T.clear(dq_2)
    T.clear(dq_3)
    dq = [(dq_2, slice(HALF, HALF + QUARTER)), (dq_3, slice(HALF + QUARTER, V_DIM))]
    if dim > V_DIM:
        dq_tail = T.alloc_fragment([TILE, dim - V_DIM], "float32")
        T.clear(dq_tail)
        dq = [*dq, (dq_tail, slice(V_DIM, dim))]
    return dq


@T.macro
def add_keys(m, dq):
    for part in dq:
        T.wgmma_gemm(m.ds, m.k[:, part[1]], part[0], transpose_A=True)


@T.macro
def write_columns(dQ, m, dq, at, barrier):
    for part in dq:
        T.copy(part[0], m.k[:, part[1]])
    T.sync_threads(barrier, GROUP)
    first, last = dq[0][1].start, dq[-1][1].stop
    for r, c in T.Parallel(TILE, last - first):
        if r < at.rows:
            dQ[at.first + r, first + c] = m.k[r, first + c]


@T.macro
def sum_heads(PSum, s, at, i, shape, thread):
    call(
        "dsa_head_sums",
        s.data,
        T.address_of(PSum[at.list, 0, i * TILE]),
        PSum.shape[2],
        at.n - i * TILE,
        thread,
        of=(shape.heads, shape.group, shape.tiles > 1),
    )
