"""Sparse indexer loss and its gradients, a thread block per query (sm_90a).

Per block of 64 selected keys, with index heads ``h``:

1. scores ``I = sum_h w_h relu(S_h)`` with ``S = K Q^T``; keep the signs of S;
2. after all blocks: softmax, KL, and ``D = student - teacher``;
3. read keys again: ``G_h = sum_j D_j [S_hj > 0] k_j``, ``dq_h = w_h G_h``, ``dw_h = q_h . G_h``,
  and ``dk_j = sum_h D_j [S_hj > 0] w_h q_h``, added to global memory. Both sums use the masked D in
  bf16.

Atomic adds of 512 bytes per selected key dominate, so two small thread blocks share an SM. Each has
a warpgroup that multiplies and adds, two warps that gather keys, and two warps that mask D: a fence
in the adding warps would wait for their adds.
"""

# Postponed annotations would hide shapes from TileLang.
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import ADDRESSES, call
from megatron_dsa.ops.hopper.programs import MANUAL_BARRIERS, compiler
from megatron_dsa.ops.hopper.tiles import GROUP, TILE, BlockWork, fetch_tile
from megatron_dsa.ops.indexer_loss.tilelang.source import SOURCE
from megatron_dsa.ops.sparse_attention.tilelang.hopper.key_gradient import SOURCE as ADDITIONS

#: Dims of an index head, and maximum length of a key list.
DIM, MOST = 128, 2048
#: Registers per thread of the multiplying and the gathering warpgroup.
REGISTERS = (216, 40)
STAGES = 3
#: Number of threads that gather keys, 16 bytes per copy.
GATHERERS = 64


# Macro arguments: `at` is the query, `m` shared memory, `here` its addresses, `done` barriers.


@T.macro
def gather(K, Ids, m, done, at, passes, thread):
    ahead = T.alloc_local([1], "int32")
    ids = T.alloc_local([8], "int32")
    ahead[0] = -1
    if thread < at.n:
        ahead[0] = Ids[at.list, thread]
    for i in T.serial(at.blocks() * passes):
        stage = i % STAGES
        T.barrier_wait(done.free[stage], (i // STAGES & 1) ^ 1)
        m.ids[stage, thread] = T.if_then_else(ahead[0] < K.shape[0], ahead[0], -1)
        after = T.if_then_else(i + 1 >= at.blocks(), i + 1 - at.blocks(), i + 1) * TILE + thread
        ahead[0] = -1
        if after < at.n:
            ahead[0] = Ids[at.list, after]
        T.sync_threads(2, GATHERERS)
        for r in T.unroll(8):
            ids[r] = m.ids[stage, r * 8 + thread // 8]
        for r in T.unroll(8):
            for u in T.unroll(2):
                column = u * 64 + thread % 8 * 8
                T.ptx_cp_async(
                    T.access_ptr(m.k[stage, r * 8 + thread // 8, column], "w", 8),
                    T.access_ptr(K[T.max(ids[r], 0), column], "r", 8),
                    8,
                    predicate=ids[r] >= 0,
                )
        T.cp_async_barrier_noinc(done.full[stage])
        T.barrier_arrive(done.full[stage])


@T.macro
def mask(m, done, at, here, thread):
    T.barrier_wait(done.differences, 0)
    for i in T.serial(at.blocks()):
        T.barrier_wait(done.mask_free[i % 2], (i // 2 & 1) ^ 1)
        for half in T.unroll(2):
            call(
                "dsa_masked_differences", here.words + i * (GROUP * 4),
                here.scores + i * (TILE * 4), here.mask + i % 2 * (TILE * TILE * 2),
                thread // 32 * 2 + half, thread % 32,
            )  # fmt: skip
        T.fence_proxy_async()
        T.barrier_arrive(done.mask[i % 2])


@T.macro
def start(Q, Weights, m, at, heads, thread):
    fetch_tile([(m.q, Q, (0, DIM))], at, TILE, GROUP, thread)
    T.ptx_commit_group()
    if thread < TILE:
        m.weights[thread] = 0.0
        if thread < heads:
            m.weights[thread] = Weights[at.first + thread]
    T.ptx_wait_group(0)
    T.fence_proxy_async()
    T.sync_threads(1, GROUP)


@T.macro
def scores(m, done, at, here, thread):
    s = T.alloc_fragment([TILE, TILE], "float32")
    weights = T.alloc_local([TILE // 4], "float32")
    call("dsa_read_weights", weights.data, here.weights, thread)
    for i in T.serial(at.blocks()):
        stage = i % STAGES
        T.barrier_wait(done.full[stage], i // STAGES & 1)
        T.wgmma_gemm(m.k[stage, :, :], m.q, s, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.barrier_arrive(done.free[stage])
        to = (here.scores + i * (TILE * 4), here.words + i * (GROUP * 4))
        call("dsa_index_scores", s.data, weights.data, *to, thread)
    T.sync_threads(1, GROUP)


@T.macro
def differences(Ids, Teacher, Value, at, keys, gradients, here, thread):
    value = T.alloc_local([1], "float32")
    value[0] = call(
        "dsa_differences", here.scores, T.address_of(Ids[at.list, 0]),
        T.address_of(Teacher[at.list, 0]), at.n, keys, here.scratch, thread,
        of=(MOST // GROUP, gradients), returns="float32",
    )  # fmt: skip
    if thread == 0:
        Value[at.list] = value[0]


@T.macro
def differentiate(Q, dQ, dW, dK, Units, m, done, at, heads, here, thread):
    dk = T.alloc_fragment([DIM, TILE], "float32")
    g = T.alloc_fragment([TILE, DIM], "float32")
    ids = T.alloc_local([TILE // 4], "int32")
    base = T.alloc_local([1], "int64")
    units = T.alloc_local([1], "float32")
    T.clear(g)
    fixed = Units is not None
    units[0] = Units[0] if fixed else 0.0
    base[0] = call("dsa_target", T.address_of(dK[0, 0]), 0, thread, of=(2,), returns="int64")
    add = (fixed, 2, TILE, 0, DIM * (8 if fixed else 4))
    for i in T.serial(at.blocks()):
        stage = (at.blocks() + i) % STAGES
        T.barrier_wait(done.full[stage], (at.blocks() + i) // STAGES & 1)
        call("dsa_read_ids", ids.data, here.ids + stage * (TILE * 4) + thread % 4 * 8)
        T.barrier_wait(done.mask[i % 2], i // 2 & 1)
        T.wgmma_gemm(
            m.q, m.mask[i % 2, :, :], dk, transpose_A=True, transpose_B=True, clear_accum=True
        )
        T.wgmma_gemm(m.mask[i % 2, :, :], m.k[stage, :, :], g, transpose_A=True)
        T.wait_wgmma(0)
        T.barrier_arrive(done.mask_free[i % 2])
        T.barrier_arrive(done.free[stage])
        call("dsa_add_keys", dk.data, ids.data, base[0], 0, units[0], of=add)
    call(
        "dsa_query_results", g.data, T.address_of(Q[at.first, 0]), T.address_of(dQ[at.first, 0]),
        T.address_of(dW[at.first]), here.weights, heads, thread,
    )  # fmt: skip


@T.macro
def addresses_of(m):
    names = ("q", "mask", "scores", "words", "ids", "weights", "scratch")
    address = T.alloc_local([len(names)], "int32")
    for i, name in enumerate(names):
        address[i] = call("dsa_here", getattr(m, name).access_ptr("r"), returns="int32")
    return SimpleNamespace(**{name: address[i] for i, name in enumerate(names)})


def build(heads: int, gradients: bool = True, fixed_point: bool = False):
    """Return the TileLang program for 1 to 64 relu index heads of 128 dims.

    Arguments (contiguous, sizes dynamic):
        Q ``[Sq * HI, 128]``, K ``[Skv, 128]`` bf16; Weights ``[Sq * HI]`` fp32; Ids ``[Sq, W]``
        int32, entries that do not index K are skipped, ``W`` at most 2048; Length ``[Sq]`` int32,
        clamped; Teacher ``[Sq, W]`` fp32, not normalised; Value ``[Sq]`` fp32, the KL; dQ, dW like
        Q, Weights; dK ``[Skv, 128]``, zeroed, fp32 for ``in_column_order_transposed``, or int64 in
        column order (``fixed_point``); Units ``[1]`` fp32.
    """
    if not 1 <= heads <= TILE:
        raise ValueError(f"heads must be 1 to {TILE}, got {heads}: a tile has {TILE} rows")
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width = T.dynamic("rows, keys, lists, width")

    @T.prim_func
    def sparse_indexer_loss(
        Q: T.Tensor([rows, DIM], bf16),
        K: T.Tensor([keys, DIM], bf16),
        Weights: T.Tensor([rows], fp32),
        Ids: T.Tensor([lists, width], int32),
        Length: T.Tensor([lists], int32),
        Teacher: T.Tensor([lists, width], fp32),
        Value: T.Tensor([lists], fp32),
        dQ: T.Tensor([rows, DIM] if gradients else [1, DIM], bf16),
        dW: T.Tensor([rows] if gradients else [1], fp32),
        dK: T.Tensor([keys, DIM] if gradients else [1, DIM], "int64" if fixed_point else fp32),
        Units: T.Tensor([1], fp32),
    ):
        with T.Kernel(lists, threads=2 * GROUP) as block:
            T.import_source(ADDRESSES + ADDITIONS + SOURCE)
            T.annotate_min_blocks_per_sm(2)
            m = SimpleNamespace(
                q=T.alloc_shared([TILE, DIM], bf16),
                k=T.alloc_shared([STAGES, TILE, DIM], bf16),
                mask=T.alloc_shared([2, TILE, TILE], bf16),
                scores=T.alloc_shared([MOST], fp32),
                words=T.alloc_shared([MOST // TILE, GROUP], "uint32"),
                ids=T.alloc_shared([STAGES, TILE], int32),
                weights=T.alloc_shared([TILE], fp32),
                scratch=T.alloc_shared([16], fp32),
            )
            done = SimpleNamespace(
                full=T.alloc_barrier(arrive_count=[2 * GATHERERS] * STAGES),
                free=T.alloc_barrier(arrive_count=[GROUP] * STAGES),
                differences=T.alloc_barrier(arrive_count=GROUP),
                mask=T.alloc_barrier(arrive_count=[GROUP - GATHERERS] * 2),
                mask_free=T.alloc_barrier(arrive_count=[GROUP] * 2),
            )
            here = addresses_of(m)
            tx = T.get_thread_binding()
            thread = tx % GROUP
            n = T.max(T.min(Length[block], width), 0)
            at = BlockWork(block, 0, block * heads, heads, n)
            if tx >= GROUP:
                T.set_max_nreg(REGISTERS[1], 0)
                if thread < GATHERERS:
                    gather(K, Ids, m, done, at, 2 if gradients else 1, thread)
                elif gradients:
                    mask(m, done, at, here, thread - GATHERERS)
            else:
                T.set_max_nreg(REGISTERS[0], 1)
                start(Q, Weights, m, at, heads, thread)
                scores(m, done, at, here, thread)
                differences(Ids, Teacher, Value, at, keys, gradients, here, thread)
                if gradients:
                    call("dsa_weigh_queries", here.q, here.weights, thread)
                    T.fence_proxy_async()
                    T.barrier_arrive(done.differences)
                    T.sync_threads(1, GROUP)
                    differentiate(
                        Q, dQ, dW, dK, Units if fixed_point else None, m, done, at, heads, here,
                        thread,
                    )  # fmt: skip
            for buffer in vars(m).values():
                call("dsa_keep", buffer.access_ptr("r"), buffer.access_ptr("r"))

    return sparse_indexer_loss


compiled = compiler(build, MANUAL_BARRIERS)
