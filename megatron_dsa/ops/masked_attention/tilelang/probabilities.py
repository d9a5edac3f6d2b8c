"""Head sums of the probabilities for a tile of 128 queries and 128 keys per thread block (sm_90a).

* ``CONSUME``: two warpgroups of 64 queries each add up the probabilities of all heads in their
  registers, and write those of selected keys, one after the other per query, with the keys;
* ``PRODUCE``: one warp that fetches queries, keys and lse of the next head. The rope key is that of
  all heads. Where two heads do not fit in shared memory, it fetches slabs of 64 dims.
"""

# No postponed annotations here: TileLang reads the tensors' shapes from them.
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP, LOG2_E, SLAB
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    BY_ROWS,
    KEYS,
    PASSES,
    REGISTERS,
    STAGES,
    THREADS,
    Dims,
    fetch,
    own_row,
)

#: Queries of a tile.
QUERIES = 128
#: Scores and sums of a thread.
OWN = QUERIES * KEYS // (2 * GROUP)

SOURCE = r"""
// sums += exp2(S * scale - lse)
template <int N>
__device__ __forceinline__ void dsa_add_head(float* sums, const float* s, float upper, float lower,
                                             float scale) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) sums[i] += exp2f(fmaf(s[i], scale, -(i % 4 / 2 ? lower : upper)));
}
// Writes the sums of the keys that row R of the thread selects, behind those of the `before` keys
// that it selects of earlier groups; and the keys, from `key` on, to row `own_row` of `ids`, if it
// is one of its `rows`. `bits`: the four words of the row, in the order of key bits. With more than
// `width` keys the launch ends with an error.
template <int R>
__device__ __forceinline__ void dsa_write_sums(float* row, int width, const float* sums,
                                               const void* bits, int before, int key, int* ids,
                                               int own_row, int rows) {
  const uint4 four = *static_cast<const uint4*>(bits);
  const unsigned words[4] = {four.x, four.y, four.z, four.w};
  // Not an assert: that is a call, and ptxas would serialise the products.
  if (before + __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w) > width)
    asm volatile("trap;");
  const bool listed = 0 <= own_row && own_row < rows;
  ids += static_cast<long long>(listed ? own_row : 0) * width;
  const int lane = threadIdx.x % 4;
  const unsigned own = lane == 0 ? four.x : lane == 1 ? four.y : lane == 2 ? four.z : four.w;
#pragma unroll
  for (int n = 0; n < 16; n++) {
    int place = before;
#pragma unroll
    for (int l = 0; l < 4; l++) {
      const int count = __popc(words[l] >> 2 * n & 3);
      before += count;
      if (l < lane) place += count;
    }
    const bool first = own >> 2 * n & 1, second = own >> (2 * n + 1) & 1;
    if (first) row[place] = sums[4 * n + 2 * R];
    if (second) row[place + first] = sums[4 * n + 2 * R + 1];
    const int id = key + 8 * n + 2 * lane;
    if (listed && first) ids[place] = id;
    if (listed && second) ids[place + first] = id + 1;
  }
}
"""


@T.macro
def produce_heads(Q, KV, Numbers, m, done, at, dims):
    """Fetch queries, keys and lse of each head."""
    last = at.first + QUERIES
    for h in T.serial(Q.shape[1]):
        slot = h % STAGES
        T.barrier_wait(done.free[slot], (h // STAGES & 1) ^ 1)
        fetch(Q[at.first : last, h, 0 : dims.nope], m.q_nope[slot, :, :], done.full[slot])
        fetch(Q[at.first : last, h, dims.nope : dims.qk], m.q_rope[slot, :, :], done.full[slot])
        fetch(KV[at.key : at.key + KEYS, h, 0 : dims.nope], m.k_nope[slot, :, :], done.full[slot])
        fetch(Numbers[h, 0:1, at.first : last], m.lse[slot, :, :], done.full[slot])
        T.barrier_arrive(done.full[slot])


@T.macro
def produce_slabs(Q, KV, Numbers, m, done, at, dims):
    """Fetch each head in slabs; the rope slab has queries only, lse comes with the first one."""
    last, slots = at.first + QUERIES, dims.tiling.slots
    slabs = dims.qk // SLAB
    for i in T.serial(Q.shape[1] * slabs):
        h, slot, column = i // slabs, i % slots, i % slabs * SLAB
        T.barrier_wait(done.free[slot], (i // slots & 1) ^ 1)
        fetch(Q[at.first : last, h, column : column + SLAB], m.q[slot, :, :], done.full[slot])
        if column < dims.nope:
            keys = KV[at.key : at.key + KEYS, h, column : column + SLAB]
            fetch(keys, m.k[slot, :, :], done.full[slot])
        if column == 0:
            fetch(Numbers[h, 0:1, at.first : last], m.lse[slot, :, :], done.full[slot])
        T.barrier_arrive(done.full[slot])


@T.macro
def produce(Q, KV, Kpe, Numbers, m, done, at, dims):
    """PRODUCE: the rope key, then queries, keys and lse of each head."""
    fetch(Kpe[at.key : at.key + KEYS, :], m.k_rope, done.k_rope[0])
    T.barrier_arrive(done.k_rope[0])
    if dims.tiling.slots > 0:
        produce_slabs(Q, KV, Numbers, m, done, at, dims)
    else:
        produce_heads(Q, KV, Numbers, m, done, at, dims)


@T.macro
def read_lse(m, lse, slot, tx):
    """Read the lse of the thread's queries."""
    for r in tuple(range(2)):
        lse[r] = m.lse[slot, 0, own_row(tx) + 8 * r]


@T.macro
def multiply_head(m, done, s, lse, h, tx):
    """``S = Q K^T`` of a head."""
    slot = h % STAGES
    T.barrier_wait(done.full[slot], h // STAGES & 1)
    T.wgmma_gemm(
        m.q_nope[slot, :, :], m.k_nope[slot, :, :], s, transpose_B=True, clear_accum=True,
        policy=BY_ROWS,
    )  # fmt: skip
    T.wgmma_gemm(m.q_rope[slot, :, :], m.k_rope, s, transpose_B=True, policy=BY_ROWS)
    read_lse(m, lse, slot, tx)
    T.wait_wgmma(0)
    T.barrier_arrive(done.free[slot])


@T.macro
def multiply_slabs(m, done, s, lse, h, dims, tx):
    """``S = Q K^T`` of a head; a slab's slot is free while the next slab is multiplied."""
    slots, slabs = dims.tiling.slots, dims.qk // SLAB
    for slab in tuple(range(slabs)):
        i = h * slabs + slab
        T.barrier_wait(done.full[i % slots], i // slots & 1)
        if slab * SLAB < dims.nope:
            T.wgmma_gemm(
                m.q[i % slots, :, :], m.k[i % slots, :, :], s, transpose_B=True,
                clear_accum=slab == 0, policy=BY_ROWS,
            )  # fmt: skip
        else:
            T.wgmma_gemm(m.q[i % slots, :, :], m.k_rope, s, transpose_B=True, policy=BY_ROWS)
        if slab == 0:
            read_lse(m, lse, i % slots, tx)
        else:
            T.wait_wgmma(1)
            T.barrier_arrive(done.free[(i - 1) % slots])
    T.wait_wgmma(0)
    T.barrier_arrive(done.free[(h * slabs + slabs - 1) % slots])


@T.macro
def consume(Bits, Before, PSum, Keys, first_listed, heads, m, done, at, dims, scale, tx):
    """CONSUME: sums over the heads, for 64 queries per warpgroup."""
    s = T.alloc_fragment([QUERIES, KEYS], "float32")
    sums = T.alloc_local([OWN], "float32")
    lse = T.alloc_local([2], "float32")
    for i in T.unroll(OWN):
        sums[i] = 0.0
    T.barrier_wait(done.k_rope[0], 0)
    for h in T.serial(heads):
        if dims.tiling.slots > 0:
            multiply_slabs(m, done, s, lse, h, dims, tx)
        else:
            multiply_head(m, done, s, lse, h, tx)
        call("dsa_add_head", sums.data, s.data, lse[0], lse[1], scale * LOG2_E, of=(KEYS // 8,))
    for r in tuple(range(2)):
        row = at.first + own_row(tx) + 8 * r
        if row < PSum.shape[0]:
            call(
                "dsa_write_sums",
                T.address_of(PSum[row, 0]),
                PSum.shape[1],
                sums.data,
                T.address_of(Bits[row, at.group, 0]),
                Before[row, at.group],
                at.key,
                T.address_of(Keys[0, 0]),
                row - first_listed,
                Keys.shape[0],
                of=(r,),
            )


def build(nope: int, rope: int, v: int):
    """Return the TileLang program for keys of ``nope`` dims and ``rope`` dims, values of ``v``.

    Its arguments (all contiguous; sizes are dynamic):
        Q ``[Sq, H, nope + rope]``, KV ``[Skv, H, nope + v]``, Kpe ``[Skv, rope]`` bf16; Numbers
        fp32 ``[H, 2, N]``, of which the lse in base 2 is read (``inf`` for queries without keys and
        past the last one); Bits int32 ``[Sq, G, 4]``, key bits; Before int32 ``[Sq, G]``, selected
        keys of earlier groups; Tiles int32 ``[ceil(Sq / 128), W]``, the groups of keys of each
        block of queries, and Count int32, how many; PSum fp32 ``[Sq, K]`` and Keys int32
        ``[n, K]``, of which only what is selected is written; Keys are of the queries from
        ``first_listed`` on; scale, positive.

    Raises:
        ValueError: dims that the tiling does not fit.
    """
    dims = Dims(nope, rope, v)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    slots = dims.tiling.slots
    stages = slots or STAGES
    queries, keys, heads, count = T.dynamic("queries, keys, heads, count")
    groups, blocks, width, wanted, listed = T.dynamic("groups, blocks, width, wanted, listed")

    @T.prim_func
    def masked_attention_probabilities(
        Q: T.Tensor([queries, heads, nope + rope], bf16),
        KV: T.Tensor([keys, heads, nope + v], bf16),
        Kpe: T.Tensor([keys, rope], bf16),
        Numbers: T.Tensor([heads, 2, count], fp32),
        Bits: T.Tensor([queries, groups, 4], int32),
        Before: T.Tensor([queries, groups], int32),
        Tiles: T.Tensor([blocks, width], int32),
        Count: T.Tensor([blocks], int32),
        PSum: T.Tensor([queries, wanted], fp32),
        Keys: T.Tensor([listed, wanted], int32),
        first_listed: T.int32,
        scale: T.float32,
    ):
        """One thread block per tile that may be; arguments as :func:`build` describes."""
        with T.Kernel(blocks * width, threads=THREADS) as number:
            T.import_source(SOURCE)
            if slots > 0:
                m = SimpleNamespace(
                    q=T.alloc_shared([slots, QUERIES, SLAB], bf16),
                    k=T.alloc_shared([slots, KEYS, SLAB], bf16),
                    k_rope=T.alloc_shared([KEYS, rope], bf16),
                    lse=T.alloc_shared([slots, 1, QUERIES], fp32),
                )
            else:
                m = SimpleNamespace(
                    q_nope=T.alloc_shared([STAGES, QUERIES, nope], bf16),
                    q_rope=T.alloc_shared([STAGES, QUERIES, rope], bf16),
                    k_nope=T.alloc_shared([STAGES, KEYS, nope], bf16),
                    k_rope=T.alloc_shared([KEYS, rope], bf16),
                    lse=T.alloc_shared([STAGES, 1, QUERIES], fp32),
                )
            done = SimpleNamespace(
                k_rope=T.alloc_barrier(arrive_count=[32]),
                full=T.alloc_barrier(arrive_count=[32] * stages),
                free=T.alloc_barrier(arrive_count=[2 * GROUP] * stages),
            )
            tx = T.get_thread_binding()
            # Tiles of a block of queries come one after the other: the L2 cache holds these.
            place = T.alloc_local([2], "int32")
            place[0] = number // width
            if number % width < Count[place[0]]:
                place[1] = Tiles[place[0], number % width]
                at = SimpleNamespace(first=place[0] * QUERIES, group=place[1], key=place[1] * KEYS)
                if tx >= 2 * GROUP:
                    T.set_max_nreg(REGISTERS[1], 0)
                    if tx < 2 * GROUP + 32:
                        produce(Q, KV, Kpe, Numbers, m, done, at, dims)
                else:
                    T.set_max_nreg(REGISTERS[0], 1)
                    consume(
                        Bits, Before, PSum, Keys, first_listed, heads, m, done, at, dims, scale, tx
                    )

    return masked_attention_probabilities


compiled = compiler(build, PASSES)
