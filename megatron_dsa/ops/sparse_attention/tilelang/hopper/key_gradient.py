"""Second half of the backward for many heads: dKV from P and dS in global memory (sm_90a).

The kernel computes ``dKV = dS Q + P dO`` for 64 keys at a time, over one or two tiles of 64 heads;
atomics bound its time. A warpgroup computes 256 value columns, and the columns past the values for
half of the keys. Products are transposed, so that a warp adds 128 contiguous bytes (fixed point:
64) to each of 4 keys.

* With one tile, the two consumers of a thread block split the columns.
* With two tiles, two thread blocks split the columns; consumers process even and odd blocks.
* A producer fetches ids, P and dS.

Consumers alternate: one runs wgmma while the other does atomic adds.
"""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import ADDRESSES, call, shared_address
from megatron_dsa.ops.hopper.programs import MANUAL_BARRIERS, compiler
from megatron_dsa.ops.hopper.tiles import GROUP, HALF, TILE, V_DIM, BlockWork, Shape, fetch

#: Registers per thread of two consumers and the producer.
REGISTERS = (216, 216, 72)
#: Value columns per accumulator; a consumer has two accumulators.
COLUMNS = 128
#: Blocks of P and dS in shared memory per number of head tiles.
STAGES = {1: 4, 2: 2}
TILE_BYTES = 2 * TILE * TILE * 2
TRANSPOSED = {"transpose_A": True, "transpose_B": True}

SOURCE = r"""
// One thread copies a block of P and dS to shared memory, counted at a barrier. Evict it first from
// L2: it is read once, and the gradients need the space.
__device__ __forceinline__ void dsa_bring(int here, const void* source, int list, int blocks,
                                          int block, int bytes, int barrier) {
  const char* from =
    static_cast<const char*>(source) + ((long long)list * blocks + block) * bytes;
  asm volatile(
    "{\n"
    ".reg .b64 policy;\n"
    "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [%0], [%1], %2, [%3], policy;\n"
    "}" :: "r"(here), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Keys of this thread's accumulators: 8 j + 2 (lane % 4) + {0, 1} of a block's 64.
__device__ __forceinline__ void dsa_read_ids(int* ids, int here) {
#pragma unroll
  for (int j = 0; j < 8; j++)
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
      : "=r"(ids[2 * j]), "=r"(ids[2 * j + 1]) : "r"(here + j * 32) : "memory");
}

// Address of this thread's columns of key 0, for M accumulators of 64 columns from `column` on.
template <int M, typename Number>
__device__ __forceinline__ long long dsa_target(Number* base, int column, int thread) {
  const int warp = thread / 32, line = thread % 32 / 4, next = sizeof(Number) == 4 ? 2 * M : 1;
  return reinterpret_cast<long long>(base + column + warp * (8 * max(2, next)) + line * next);
}
// Adds a value to a key in 64-bit fixed point; `units`, a power of two, is the scale.
template <int COLUMN>
__device__ __forceinline__ void dsa_add_integer(long long row, int id, float value, float units) {
  asm volatile(
    "{\n"
    ".reg .pred selected;\n"
    ".reg .s64 fixed;\n"
    "cvt.rni.s64.f32 fixed, %2;\n"
    "setp.ge.s32 selected, %1, 0;\n"
    "@selected red.global.add.u64 [%0 + %3], fixed;\n"
    "}" :: "l"(row), "r"(id), "f"(value * units), "n"(COLUMN * 8) : "memory");
}
// Adds a warpgroup's M accumulators [64 columns, KEYS], part `part` of a block, to keys of STRIDE
// bytes, FIRST columns past `base`: 2 M columns of each key, in fp32 as one vector.
template <bool FIXED, int M, int KEYS, int FIRST, int STRIDE>
__device__ __forceinline__ void dsa_add_keys(const float* acc, const int* ids, long long base,
                                             int part, float units) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) {
    const float* x = acc + i / 2 * 4 + i % 2;
    const int id = KEYS < 64 && part ? ids[i + 16 - KEYS / 4] : ids[i];
    const long long row = base + (long long)id * STRIDE;
    if constexpr (FIXED) {
      dsa_add_integer<FIRST>(row, id, x[0], units);
      dsa_add_integer<FIRST + 8>(row, id, x[2], units);
      if constexpr (M == 2) {
        dsa_add_integer<FIRST + 64>(row, id, x[KEYS / 2], units);
        dsa_add_integer<FIRST + 72>(row, id, x[KEYS / 2 + 2], units);
      }
    } else if constexpr (M == 2) {
      asm volatile(
        "{\n"
        ".reg .pred selected;\n"
        "setp.ge.s32 selected, %1, 0;\n"
        "@selected red.global.add.v4.f32 [%0 + %6], {%2, %3, %4, %5};\n"
        "}" :: "l"(row), "r"(id), "f"(x[0]), "f"(x[2]), "f"(x[KEYS / 2]), "f"(x[KEYS / 2 + 2]),
               "n"(FIRST * 4) : "memory");
    } else {
      asm volatile(
        "{\n"
        ".reg .pred selected;\n"
        "setp.ge.s32 selected, %1, 0;\n"
        "@selected red.global.add.v2.f32 [%0 + %4], {%2, %3};\n"
        "}" :: "l"(row), "r"(id), "f"(x[0]), "f"(x[2]), "n"(FIRST * 4) : "memory");
    }
  }
}
"""


@T.macro
def start(Q, dO, m, at, shape, tx):
    v_part, tail = V_DIM // shape.tiles, shape.tail
    for t, r in tuple((t, r) for t in range(shape.tiles) for r in range(2)):
        row = r * 32 + tx // 8
        source = T.min(at.first + t * TILE + row, Q.shape[0] - 1)
        wanted = t * TILE + row < at.rows
        offset = at.rank * v_part
        fetch(m.do[t], dO, row, source, wanted, (0, v_part), tx, offset)
        fetch(m.q[t], Q, row, source, wanted, (0, v_part), tx, offset)
        if tail:
            fetch(m.q[t], Q, row, source, wanted, (v_part, v_part + tail), tx, V_DIM - v_part)
    T.ptx_commit_group()
    T.ptx_wait_group(0)
    T.fence_proxy_async()
    T.sync_threads(1, 2 * GROUP)


@T.macro
def produce(Ids, PdS, m, done, at, keys, tiles, thread):
    ahead = T.alloc_local([1], "int32")
    here = T.alloc_local([2], "int32")
    here[0] = shared_address(m.pds[0, 0, 0])
    here[1] = shared_address(done.full[0])
    stages = STAGES[tiles]
    if thread < TILE:
        ahead[0] = -1
        if thread < at.n:
            ahead[0] = Ids[at.list, thread]
        for i in T.serial(at.blocks()):
            stage = i % stages
            T.barrier_wait(done.free[stage], (i // stages & 1) ^ 1)
            if thread == 0:
                call(
                    "dsa_bring",
                    here[0] + stage * (tiles * TILE_BYTES),
                    T.address_of(PdS[0, 0, 0, 0, 0, 0]),
                    at.list,
                    PdS.shape[1],
                    i,
                    tiles * TILE_BYTES,
                    here[1] + stage * 8,
                )
            m.ids[stage, thread] = T.if_then_else(ahead[0] < keys, ahead[0], -1)
            T.barrier_arrive(done.full[stage])
            ahead[0] = -1
            if (i + 1) * TILE + thread < at.n:
                ahead[0] = Ids[at.list, (i + 1) * TILE + thread]


@T.macro
def consume(dKV, Units, m, done, at, tiles, wg, thread):
    part = at.rank if tiles == 2 else wg
    first = 0 if tiles == 2 else wg * HALF
    v_part, dim, fixed = V_DIM // tiles, dKV.shape[1], Units is not None
    tail = dim - V_DIM
    acc_0 = T.alloc_fragment([COLUMNS, TILE], "float32")
    acc_1 = T.alloc_fragment([COLUMNS, TILE], "float32")
    if tail:
        acc_tail = T.alloc_fragment([tail, TILE // 2], "float32")
    ids = T.alloc_local([TILE // 4], "int32")
    here = T.alloc_local([1], "int32")
    base = T.alloc_local([2], "int64")
    units = T.alloc_local([1], "float32")
    here[0] = shared_address(m.ids[0, 0]) + thread % 4 * 8
    for f, column in ((0, part * HALF), (1, V_DIM)):
        base[f] = call(
            "dsa_target", T.address_of(dKV[0, 0]), column, thread, of=(2 - f,), returns="int64"
        )
    units[0] = Units[0] if fixed else 0.0
    stride = dim * (8 if fixed else 4)
    for i in T.serial((at.blocks() + 1 - wg) // 2 if tiles == 2 else at.blocks()):
        stage = wg if tiles == 2 else i % STAGES[1]
        T.barrier_wait(done.full[stage], i & 1 if tiles == 2 else i // STAGES[1] & 1)
        call("dsa_read_ids", ids.data, here[0] + stage * (TILE * 4))
        T.barrier_wait(done.turn[wg], (i & 1) ^ 1 ^ wg)
        b = stage * (tiles * 2)
        for acc, c in ((acc_0, first), (acc_1, first + COLUMNS)):
            columns = slice(c, c + COLUMNS)
            for t in tuple(range(tiles)):
                p, ds = b + t * 2, b + t * 2 + 1
                T.wgmma_gemm(
                    m.do[t][:, columns], m.pds[p, :, :], acc, **TRANSPOSED, clear_accum=t == 0
                )
                T.wgmma_gemm(m.q[t][:, columns], m.pds[ds, :, :], acc, **TRANSPOSED)
        if tail:
            for t in tuple(range(tiles)):
                T.wgmma_gemm(
                    m.q[t][:, v_part:],
                    m.pds[b + t * 2 + 1, part * 32 : part * 32 + 32, :],
                    acc_tail,
                    **TRANSPOSED,
                    clear_accum=t == 0,
                )
        T.wait_wgmma((3 if tail else 2) * tiles)
        to = (ids.data, base[0], 0, units[0])
        call("dsa_add_keys", acc_0.data, *to, of=(fixed, 2, TILE, 0, stride))
        T.wait_wgmma(0)
        T.barrier_arrive(done.free[stage])
        T.barrier_arrive(done.turn[1 - wg])
        call("dsa_add_keys", acc_1.data, *to, of=(fixed, 2, TILE, COLUMNS, stride))
        if tail:
            to = (ids.data, base[1], part, units[0])
            call("dsa_add_keys", acc_tail.data, *to, of=(fixed, 1, TILE // 2, 0, stride))


def build(heads: int, dim: int, v_dim: int, fixed_point: bool = False):
    """Return the TileLang program; for arguments see :func:`.query_gradient.build`.

    dKV: zeroed; integers in column order, fp32 in the order that
    :func:`~megatron_dsa.ops.hopper.sums.in_column_order_transposed` converts.
    """
    shape = Shape(heads, dim, v_dim)
    tiles = shape.tiles
    if tiles not in STAGES:
        raise ValueError(
            f"heads must be 1 to {max(STAGES) * TILE}, got {heads}: shared memory is full"
        )
    stages, v_part = STAGES[tiles], V_DIM // tiles
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    rows, keys, lists, width, most = T.dynamic("rows, keys, lists, width, most")

    @T.prim_func
    def sparse_mla_key_gradient(
        Q: T.Tensor([rows, dim], bf16),
        dO: T.Tensor([rows, v_dim], bf16),
        Ids: T.Tensor([lists, width], int32),
        Length: T.Tensor([lists], int32),
        PdS: T.Tensor([lists, most, tiles, 2, TILE, TILE], bf16),
        dKV: T.Tensor([keys, dim], "int64" if fixed_point else fp32),
        Units: T.Tensor([1], fp32),
    ):
        with T.Kernel(lists * tiles, threads=3 * GROUP) as block:
            T.import_source(ADDRESSES + SOURCE)
            m = SimpleNamespace(
                # Allocate one buffer per head tile: wgmma_gemm misplaces a slice's columns past 64.
                q=[T.alloc_shared([TILE, v_part + shape.tail], bf16) for _ in range(tiles)],
                do=[T.alloc_shared([TILE, v_part], bf16) for _ in range(tiles)],
                pds=T.alloc_shared([stages * tiles * 2, TILE, TILE], bf16),
                ids=T.alloc_shared([stages, TILE], int32),
            )
            done = SimpleNamespace(
                # The barrier counts the thread that starts the copy and all threads that write ids.
                full=T.alloc_barrier(arrive_count=[TILE + 1] * stages),
                free=T.alloc_barrier(arrive_count=[GROUP * (3 - tiles)] * stages),
                turn=T.alloc_barrier(arrive_count=[GROUP, GROUP]),
            )
            tx = T.get_thread_binding()
            thread = tx % GROUP
            query = block // tiles
            n = Length[query]
            at = BlockWork(query, 0, query * heads, heads, n, block % tiles)
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[2], 0)
                produce(Ids, PdS, m, done, at, keys, tiles, thread)
            elif tx < GROUP:
                T.set_max_nreg(REGISTERS[0], 1)
                start(Q, dO, m, at, shape, tx)
                consume(dKV, Units if fixed_point else None, m, done, at, tiles, 0, thread)
            else:
                T.set_max_nreg(REGISTERS[1], 1)
                start(Q, dO, m, at, shape, tx)
                consume(dKV, Units if fixed_point else None, m, done, at, tiles, 1, thread)
            call("dsa_keep", T.address_of(m.pds[0, 0, 0]), T.address_of(m.ids[0, 0]))

    return sparse_mla_key_gradient


compiled = compiler(build, MANUAL_BARRIERS)
