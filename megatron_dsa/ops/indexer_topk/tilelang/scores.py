"""Index scores on Hopper (sm_90a): ``I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])``.

A thread block keeps all heads of ``512 / HI`` adjacent queries in shared memory and streams blocks
of 64 keys. Keys are the M dim of products, so a thread sums heads in registers. Each of two
warpgroups has half of the queries and two accumulators ``[64 keys, 128 heads]``. Tensor cores fill
one accumulator while the other is summed. One warp fetches queries and keys.

One thread block per SM computes an equal share of the visible key blocks of all query tiles.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import MANUAL_BARRIERS, compiler
from megatron_dsa.ops.hopper.tiles import GROUP
from megatron_dsa.ops.indexer_topk.tilelang import shares, sums

#: Keys per block, query heads per accumulator, query heads per tile, index dims.
KEYS, COLUMNS, TILE, DIM = 64, 128, 512, 128
STAGES = 4
CHUNKS = TILE // COLUMNS
PARTS = CHUNKS // 2
#: Registers per consumer thread and per producer thread.
REGISTERS = (240, 24)
HEADS = (16, 32, 64)
#: Dtype -> tiles of q in shared memory, relu variant. fp8 halves the time of products, so RELU_MAX
#: would be the bottleneck.
DTYPES = {"bfloat16": (1, sums.RELU_MAX), "float8_e4m3fn": (2, sums.RELU_MIXED)}


@dataclass(frozen=True)
class Kind:
    heads: int
    dtype: str
    relu: int
    buffers: int

    @property
    def is_fp8(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def thread_queries(self) -> int:
        return max(COLUMNS // self.heads // 4, 1)

    @property
    def of_tile(self) -> tuple[int, int]:
        return TILE // self.heads, KEYS

    @property
    def of_unit(self) -> tuple[int, int, bool]:
        return self.heads, COLUMNS, self.is_fp8


# Macro arguments: `at` holds Start and End; `m` holds shared memory; `done` holds barriers; `share`
# holds tile, key blocks of the tile to skip, blocks left, blocks done, tiles done; `span` holds the
# first block and the number of blocks.


def walk():
    return T.alloc_local([5], "int32"), T.alloc_local([2], "int32")


@T.macro
def begin(share, m):
    for i in T.unroll(3):
        share[i] = m.share[i]
    share[3] = 0
    share[4] = 0


@T.macro
def look(share, span, at, kind):
    call(
        "dsa_span", span.data, T.address_of(at.start[0]), T.address_of(at.end[0]), share[0],
        at.start.shape[0], share[1], share[2], of=kind.of_tile,
    )  # fmt: skip


@T.macro
def advance(share, span):
    share[0] += 1
    share[1] = 0
    share[2] -= span[1]
    share[3] += span[1]
    share[4] += T.if_then_else(span[1] > 0, 1, 0)


@T.macro
def fetch_queries(Q, m, done, share, c, buffers):
    slot = share[4] % buffers * CHUNKS + c
    row = share[0] * TILE + c * COLUMNS
    T.barrier_wait(done.q_free[slot], (share[4] // buffers & 1) ^ 1)
    source = Q[row : row + COLUMNS, :]
    T.tma_copy(source, m.q[slot, :, :], barrier=done.q[slot], leader_scope_threads=32)
    T.barrier_arrive(done.q[slot])


@T.macro
def fetch_keys(K, m, done, share, span, b):
    i = share[3] + b
    key = (span[0] + b) * KEYS
    T.barrier_wait(done.k_free[i % STAGES], (i // STAGES & 1) ^ 1)
    source = K[key : key + KEYS, :]
    T.tma_copy(source, m.k[i % STAGES, :, :], barrier=done.k[i % STAGES], leader_scope_threads=32)
    T.barrier_arrive(done.k[i % STAGES])


@T.macro
def produce(Q, K, m, done, at, kind):
    share, span = walk()
    begin(share, m)
    while share[2] > 0:
        look(share, span, at, kind)
        if span[1] > 0:
            for c in tuple(range(PARTS)):
                fetch_queries(Q, m, done, share, c, kind.buffers)
            fetch_keys(K, m, done, share, span, 0)
            for c in tuple(range(PARTS, CHUNKS)):
                fetch_queries(Q, m, done, share, c, kind.buffers)
            for b in T.serial(1, span[1]):
                fetch_keys(K, m, done, share, span, b)
        advance(share, span)


@T.macro
def multiply(m, acc, slot, i, part):
    T.wgmma_gemm(
        m.k[i % STAGES, :, :], m.q[slot + part, :, :], acc[part], transpose_B=True, clear_accum=True
    )


@T.macro
def write(acc, part, values, column, kind):
    call(
        "dsa_write", acc[part].data, T.address_of(values.weights[part * COLUMNS // 4]),
        values.scales.data, T.address_of(values.target[part * kind.thread_queries]),
        T.address_of(values.seen[part * kind.thread_queries * 2]), column,
        of=(*kind.of_unit, kind.relu, kind.is_fp8),
    )  # fmt: skip


@T.macro
def prepare(Weights, Scores, values, at, chunk, part, kind):
    call(
        "dsa_weights", T.address_of(values.weights[part * COLUMNS // 4]), T.address_of(Weights[0]),
        chunk * COLUMNS, Weights.shape[0], of=(COLUMNS, kind.relu),
    )  # fmt: skip
    call(
        "dsa_rows", T.address_of(values.target[part * kind.thread_queries]),
        T.address_of(values.seen[part * kind.thread_queries * 2]), T.address_of(Scores[0, 0]),
        Scores.strides[0], T.address_of(at.start[0]), T.address_of(at.end[0]),
        chunk * (COLUMNS // kind.heads), Scores.shape[0], of=kind.of_unit,
    )  # fmt: skip


@T.macro
def multiply_and_sum(KeyScales, m, done, share, span, slot, acc, values, kind):
    for b in T.serial(span[1]):
        i = share[3] + b
        column = (span[0] + b) * KEYS
        if kind.is_fp8:
            call(
                "dsa_scales", values.scales.data, T.address_of(KeyScales[0]), column,
                KeyScales.shape[0], of=kind.of_unit,
            )  # fmt: skip
        T.barrier_wait(done.k[i % STAGES], i // STAGES & 1)
        # A product in flight across iterations would make ptxas wait for every product.
        multiply(m, acc, slot, i, 0)
        multiply(m, acc, slot, i, 1)
        T.wait_wgmma(1)
        write(acc, 0, values, column, kind)
        T.wait_wgmma(0)
        T.barrier_arrive(done.k_free[i % STAGES])
        if b + 1 == span[1]:
            T.barrier_arrive(done.q_free[slot])
            T.barrier_arrive(done.q_free[slot + 1])
        write(acc, 1, values, column, kind)


@T.macro
def consume(Weights, KeyScales, Scores, m, done, at, wg, kind):
    acc = [T.alloc_fragment([KEYS, COLUMNS], "float32") for _ in range(PARTS)]
    values = SimpleNamespace(
        weights=T.alloc_local([PARTS * COLUMNS // 4], "float32"),
        scales=T.alloc_local([2], "float32"),
        target=T.alloc_local([PARTS * kind.thread_queries], "int64"),
        seen=T.alloc_local([PARTS * kind.thread_queries * 2], "int32"),
    )
    share, span = walk()
    begin(share, m)
    while share[2] > 0:
        look(share, span, at, kind)
        if span[1] > 0:
            slot = share[4] % kind.buffers * CHUNKS + wg * PARTS
            for part in tuple(range(PARTS)):
                chunk = share[0] * CHUNKS + wg * PARTS + part
                prepare(Weights, Scores, values, at, chunk, part, kind)
            for part in tuple(range(PARTS)):
                T.barrier_wait(done.q[slot + part], share[4] // kind.buffers & 1)
            multiply_and_sum(KeyScales, m, done, share, span, slot, acc, values, kind)
        advance(share, span)


def build(heads: int, dtype: str = "bfloat16", relu: bool = True):
    """Return the TileLang program for ``heads`` index heads of 128 dims.

    Arguments as in :func:`.launch.scores`, with queries and heads in one dim. Columns from Start to
    End are visible, and only their Scores are written. ``blocks`` counts thread blocks.
    """
    if heads not in HEADS:
        raise ValueError(f"heads must be one of {HEADS}, got {heads}: pad with heads of weight 0")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype}")
    buffers, with_relu = DTYPES[dtype]
    kind = Kind(heads, dtype, with_relu if relu else sums.RELU_NONE, buffers)
    fp32, int32 = "float32", "int32"
    queries, q_rows, keys, stride = T.dynamic("queries, q_rows, keys, stride")

    @T.prim_func
    def index_scores(
        Q: T.Tensor([q_rows, DIM], dtype),
        K: T.Tensor([keys, DIM], dtype),
        Weights: T.Tensor([q_rows], fp32),
        KeyScales: T.Tensor([keys if kind.is_fp8 else 1], fp32),
        Start: T.Tensor([queries], int32),
        End: T.Tensor([queries], int32),
        Scores: T.StridedTensor([queries, keys], (stride, 1), fp32),
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=3 * GROUP):
            T.import_source(shares.SOURCE + sums.SOURCE)
            m = SimpleNamespace(
                q=T.alloc_shared([buffers * CHUNKS, COLUMNS, DIM], dtype),
                k=T.alloc_shared([STAGES, KEYS, DIM], dtype),
                sums=T.alloc_shared([3 * GROUP // 32], int32),
                share=T.alloc_shared([3], int32),
            )
            done = SimpleNamespace(
                q=T.alloc_barrier(arrive_count=[32] * (CHUNKS * buffers)),
                q_free=T.alloc_barrier(arrive_count=[GROUP] * (CHUNKS * buffers)),
                k=T.alloc_barrier(arrive_count=[32] * STAGES),
                k_free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
            )
            at = SimpleNamespace(start=Start, end=End)
            tx = T.get_thread_binding()
            call(
                "dsa_share", T.address_of(Start[0]), T.address_of(End[0]), queries,
                T.address_of(m.sums[0]), T.address_of(m.share[0]), of=(*kind.of_tile, 3 * GROUP),
            )  # fmt: skip
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[1], 0)
                if tx < 2 * GROUP + 32:
                    produce(Q, K, m, done, at, kind)
            elif tx < GROUP:
                T.set_max_nreg(REGISTERS[0], 1)
                consume(Weights, KeyScales, Scores, m, done, at, 0, kind)
            else:
                T.set_max_nreg(REGISTERS[0], 1)
                consume(Weights, KeyScales, Scores, m, done, at, 1, kind)

    return index_scores


compiled = compiler(build, MANUAL_BARRIERS)
