"""Forward of sparse attention, 64 query heads per thread block (sm_90a).

Two warpgroups process pairs of 64-key blocks. Each multiplies half of the value columns by its
block's P, from registers, then by the other block's P, from shared memory:

* ``EVEN``: ``S0 = Q K0^T``, its maximum, P0, ``O_L += P0 V0_L``, then ``O_L += P1 V1_L``;
* ``ODD``: ``S1 = Q K1^T``, the maximum of both, P1, ``O_R += P1 V1_R``, then ``O_R += P0 V0_R``;
* ``GATHER``: fetches keys as soon as half of a buffer is free.

One warpgroup computes exponentials while the other multiplies. EVEN uses the maximum of its block,
and rescales P0 and O_L once ODD has the maximum of both. EVEN processes an unpaired last block.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import NO_HOISTING, call
from megatron_dsa.ops.hopper.programs import MANUAL_BARRIERS, compiler
from megatron_dsa.ops.hopper.tiles import (
    COPIED_KEYS,
    GROUP,
    HALF,
    LOG2_E,
    SHARED,
    TILE,
    V_DIM,
    Lists,
    Shape,
    block_work,
    fetch,
    fetch_tile,
    list_ahead,
)
from megatron_dsa.ops.sparse_attention.tilelang.softmax import (
    LOWEST,
    divisors,
    raise_top,
    write_lse,
)

#: Registers per thread of the warpgroups EVEN, ODD and GATHER.
REGISTERS = (216, 216, 72)
LEFT, RIGHT = 0, 1
REFILLS = ((0, LEFT), (1, RIGHT), (0, RIGHT), (1, LEFT))
PAIR = 2 * TILE

SOURCE = (
    NO_HOISTING
    + r"""
// Sets unselected scores to -inf; bit c of a row is its column c. `first` and `second` are the bits
// of this thread's rows among the first and second eight rows of its warp.
__device__ __forceinline__ void dsa_select(float* score, const void* first, const void* second) {
  const uint2 upper = *static_cast<const uint2*>(first);
  const uint2 lower = *static_cast<const uint2*>(second);
  if ((upper.x & upper.y & lower.x & lower.y) == ~0u) return;
  const int shift = threadIdx.x % 4 * 2;
  const unsigned words[4] = {
    upper.x >> shift, lower.x >> shift, upper.y >> shift, lower.y >> shift};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const unsigned word = words[i / 16 * 2 + i % 4 / 2];
    if (!(word & 1u << (i / 4 % 4 * 8 + i % 2))) score[i] = -INFINITY;
  }
}
"""
)


@T.macro
def start(Q, m, done, at, dim, tx):
    fetch_tile([(m.q, Q, (0, dim))], at, TILE, 2 * GROUP, tx)
    T.cp_async_barrier_noinc(done.queries)


@T.macro
def gather(KV, Ids, Members, m, done, at, shape, thread):
    ids = T.alloc_local([PAIR // COPIED_KEYS], "int32")
    ahead = T.alloc_local([1], "int32")
    members = T.alloc_local([1], "uint8")
    word = T.alloc_local([1], "uint32")
    lists = Lists(KV, Ids, Members, shape.group, ahead, members)
    list_ahead(lists, at, 0, PAIR, thread)
    for i in T.serial(at.blocks(PAIR)):
        # The buffers of pair i - 2 are free, so overwrite the pair's ids.
        ahead[0] = T.if_then_else(ahead[0] < KV.shape[0], ahead[0], -1)
        m.ids[i % 2, thread] = ahead[0]
        note_members(lists, m, i, word, thread)
        list_ahead(lists, at, i + 1, PAIR, thread)
        T.sync_threads(8, GROUP)
        for r in T.unroll(PAIR // COPIED_KEYS):
            ids[r] = m.ids[i % 2, r * COPIED_KEYS + thread // 8]
        for buffer, side in REFILLS:
            if 2 * i + buffer < at.blocks():
                T.barrier_wait(done.keys_free[2 * buffer + side], (i & 1) ^ 1)
                for r in tuple(range(TILE // COPIED_KEYS)):
                    key = ids[buffer * TILE // COPIED_KEYS + r]
                    row = r * COPIED_KEYS + thread // 8
                    columns = ((0, HALF), (HALF, shape.dim))[side]
                    fetch(m.k[buffer], KV, row, T.max(key, 0), key >= 0, columns, thread)
                    call("dsa_no_hoisting")
                T.cp_async_barrier_noinc(done.keys[2 * buffer + side])
                T.barrier_arrive(done.keys[2 * buffer + side])


@T.macro
def note_members(lists, m, i, word, thread):
    for g in tuple(range(lists.group)):
        selected = lists.ahead[0] >= 0
        if lists.group > 1:
            selected = T.And(selected, (lists.members[0] >> g & 1) != 0)
        word[0] = T.cast(T.ballot(selected), "uint32")
        if thread % 32 == 0:
            m.selected[i % 2, thread // TILE, g, thread // 32 % 2] = word[0]


@T.macro
def select(s, m, i, buffer, shape, tx):
    row = tx % GROUP // 32 * 16 + tx % 32 // 4
    first, second = (
        T.address_of(m.selected[i % 2, buffer, T.min(r // shape.heads, shape.group - 1), 0])
        for r in (row, row + 8)
    )
    call("dsa_select", s.data, first, second)


@T.macro
def finish(O, Lse, Sink, o, top, total, m, at, shape, side):  # noqa: E741
    """Normalise and write half of O; warpgroup ODD also writes lse."""
    factor = T.alloc_fragment([TILE], "float32")
    T.copy(total, m.tops[side, :])
    # O reuses the key buffers, which both warpgroups must have read.
    T.sync_threads(9, 2 * GROUP)
    for r in T.Parallel(TILE):
        total[r] = m.tops[0, r] + m.tops[1, r]
    divisors(factor, Sink, top, total, at, shape)
    scale_rows(o, factor)
    T.copy(o, m.k[side][:, :HALF])
    T.sync_threads(10 + side, GROUP)
    for r, c in T.Parallel(TILE, HALF):
        if r < at.rows:
            O[at.first + r, side * HALF + c] = m.k[side][r, c]
    if side == RIGHT:
        write_lse(Lse, top, total, at, shape)


def fragments():
    matrices = ((TILE, "float32"), (TILE, "bfloat16"), (HALF, "float32"))
    numbers = (T.alloc_fragment([TILE], "float32") for _ in range(4))
    return *(T.alloc_fragment([TILE, n], dtype) for n, dtype in matrices), *numbers


@T.macro
def scale_rows(x, factors):
    for r, c in T.Parallel(TILE, x.shape[1]):
        x[r, c] *= factors[r]


@T.macro
def begin(o, top, total, done):
    T.clear(o)
    T.clear(total)
    T.fill(top, LOWEST)
    T.barrier_wait(done.queries, 0)


@T.macro
def exponentials(s, p, o, top, decay, scale):
    for r, k in T.Parallel(TILE, TILE):
        s[r, k] = T.exp2(s[r, k] * (scale * LOG2_E) - top[r])
    T.copy(s, p)
    scale_rows(o, decay)


@T.macro
def add_up(s, peak, decay, total):
    T.reduce_sum(s, peak, dim=1)
    for r in T.Parallel(TILE):
        total[r] = total[r] * decay[r] + peak[r]


@T.macro
def even_scores(s, m, done, i, multiplying):
    T.barrier_wait(done.keys[LEFT], i & 1)
    T.wgmma_gemm(m.q[:, :HALF], m.k[0][:, :HALF], s, transpose_B=True, clear_accum=True)
    if multiplying:
        T.wait_wgmma(1)
        T.barrier_arrive(done.keys_free[2 + LEFT])
    T.barrier_wait(done.keys[RIGHT], i & 1)
    T.wgmma_gemm(m.q[:, HALF:], m.k[0][:, HALF:], s, transpose_B=True)
    T.wait_wgmma(0)


@T.macro
def even(O, Lse, Sink, m, done, at, shape, scale, tx):  # noqa: E741
    s, p, o, peak, top, decay, total = fragments()
    begin(o, top, total, done)
    if at.blocks(PAIR) > 0:
        even_scores(s, m, done, 0, False)
    for i in T.serial(at.blocks(PAIR)):
        select(s, m, i, 0, shape, tx)
        T.reduce_max(s, peak, dim=1)
        raise_top(peak, top, decay, scale)
        T.copy(top, m.tops[0, :])
        T.barrier_arrive(done.tops[0])
        exponentials(s, p, o, top, decay, scale)
        T.wgmma_gemm(p, m.k[0][:, :HALF], o)
        add_up(s, peak, decay, total)
        T.wait_wgmma(0)
        T.barrier_arrive(done.keys_free[LEFT])
        T.barrier_wait(done.tops[1], i & 1)
        for r in T.Parallel(TILE):
            peak[r] = m.tops[1, r]
            decay[r] = T.exp2(top[r] - peak[r])
            top[r] = peak[r]
            total[r] *= decay[r]
        scale_rows(s, decay)
        T.copy(s, m.p[0])
        T.fence_proxy_async()
        T.barrier_arrive(done.p[0])
        scale_rows(o, decay)
        T.barrier_wait(done.p[1], i & 1)
        if 2 * i + 1 < at.blocks():
            T.wgmma_gemm(m.p[1], m.k[1][:, :HALF], o)
        if i + 1 < at.blocks(PAIR):
            even_scores(s, m, done, i + 1, True)
        else:
            T.wait_wgmma(0)
    finish(O, Lse, Sink, o, top, total, m, at, shape, LEFT)


@T.macro
def odd(O, Lse, Sink, m, done, at, shape, scale, tx):  # noqa: E741
    s, p, o, peak, top, decay, total = fragments()
    begin(o, top, total, done)
    for i in T.serial(at.blocks(PAIR)):
        if 2 * i + 1 < at.blocks():
            T.barrier_wait(done.keys[2 + RIGHT], i & 1)
            T.wgmma_gemm(m.q[:, HALF:], m.k[1][:, HALF:], s, transpose_B=True, clear_accum=True)
            T.barrier_wait(done.keys[2 + LEFT], i & 1)
            T.wgmma_gemm(m.q[:, :HALF], m.k[1][:, :HALF], s, transpose_B=True)
            T.wait_wgmma(0)
            select(s, m, i, 1, shape, tx)
        else:
            T.fill(s, -T.infinity("float32"))
        T.reduce_max(s, peak, dim=1)
        T.barrier_wait(done.tops[0], i & 1)
        for r in T.Parallel(TILE):
            peak[r] = T.max(peak[r] * (scale * LOG2_E), m.tops[0, r])
            decay[r] = T.exp2(top[r] - peak[r])
            top[r] = peak[r]
        T.copy(top, m.tops[1, :])
        T.barrier_arrive(done.tops[1])
        exponentials(s, p, o, top, decay, scale)
        if 2 * i + 1 < at.blocks():
            T.wgmma_gemm(p, m.k[1][:, HALF:V_DIM], o)
        T.copy(s, m.p[1])
        T.fence_proxy_async()
        T.barrier_arrive(done.p[1])
        add_up(s, peak, decay, total)
        T.barrier_wait(done.p[0], i & 1)
        T.wgmma_gemm(m.p[0], m.k[0][:, HALF:V_DIM], o)
        T.wait_wgmma(1)
        T.barrier_arrive(done.keys_free[2 + RIGHT])
        T.wait_wgmma(0)
        T.barrier_arrive(done.keys_free[RIGHT])
    finish(O, Lse, Sink, o, top, total, m, at, shape, RIGHT)


def build(heads: int, dim: int, v_dim: int, group: int = 1, with_sink: bool = False):
    """Return the TileLang program; for arguments see :func:`.backward.build`.

    Ids outside of KV select nothing; Lse excludes Sink; scale is positive.
    """
    shape = Shape(heads, dim, v_dim, group)
    # P0 overwrites K0's rope columns, which only S0 needs.
    slots = 1 if shape.tail else 2
    needed = 2 * TILE * (3 * dim + slots * TILE) + 4 * (4 * TILE + 2 * TILE + 8 * group) + 1024
    if needed > SHARED:
        raise ValueError(f"{needed} bytes of shared memory needed, a thread block has {SHARED}")
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width = T.dynamic("rows, keys, lists, width")

    @T.prim_func
    def sparse_mla_forward(
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
        with T.Kernel(lists * shape.tiles, threads=3 * GROUP) as block:
            T.import_source(SOURCE)
            k = (T.alloc_shared([TILE, dim], bf16), T.alloc_shared([TILE, dim], bf16))
            p = T.alloc_shared([slots, TILE, TILE], bf16)
            m = SimpleNamespace(
                q=T.alloc_shared([TILE, dim], bf16),
                k=k,
                p=(k[0][:, v_dim:] if shape.tail else p[1, :, :], p[0, :, :]),
                tops=T.alloc_shared([2, TILE], fp32),
                ids=T.alloc_shared([2, 2 * TILE], int32),
                selected=T.alloc_shared([2, 2, group, 2], "uint32"),
            )
            # Barriers count arriving copies and threads.
            done = SimpleNamespace(
                queries=T.alloc_barrier(arrive_count=2 * GROUP),
                keys=T.alloc_barrier(arrive_count=[2 * GROUP] * 4),
                keys_free=T.alloc_barrier(arrive_count=[GROUP] * 4),
                tops=T.alloc_barrier(arrive_count=[GROUP] * 2),
                p=T.alloc_barrier(arrive_count=[GROUP] * 2),
            )
            tx = T.get_thread_binding()
            at = block_work(block, Length, rows, shape)
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[2], 0)
                gather(KV, Ids, Members, m, done, at, shape, tx % GROUP)
            elif tx < GROUP:
                T.set_max_nreg(REGISTERS[0], 1)
                start(Q, m, done, at, dim, tx)
                even(O, Lse, Sink if with_sink else None, m, done, at, shape, scale, tx)
            else:
                T.set_max_nreg(REGISTERS[1], 1)
                start(Q, m, done, at, dim, tx)
                odd(O, Lse, Sink if with_sink else None, m, done, at, shape, scale, tx)

    return sparse_mla_forward


compiled = compiler(build, MANUAL_BARRIERS)
