"""Head sums of the probabilities for a tile of 128 queries and 128 keys per thread block (sm_90a).

* ``CONSUME``: two warpgroups of 64 queries each add up the probabilities of all heads in their
  registers, and write those of selected keys, one after the other per query, with the keys;
* ``PRODUCE``: one warp that fetches queries, keys and lse of the next head. The rope key is that of
  all heads.

The teacher of the dense indexer loss (:mod:`megatron_dsa.ops.indexer_loss.tilelang.teacher`) sums
over the heads likewise.
"""

# No postponed annotations here: TileLang reads the tensors' shapes from them.
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP, LOG2_E
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

ADD_HEAD = r"""
// sums += exp2(S * scale - lse)
template <int N>
__device__ __forceinline__ void dsa_add_head(float* sums, const float* s, float upper, float lower,
                                             float scale) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) sums[i] += exp2f(fmaf(s[i], scale, -(i % 4 / 2 ? lower : upper)));
}
"""
SOURCE = (
    ADD_HEAD
    + r"""
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
)


def shared(nope: int, rope: int, rope_per_head: bool = False):
    """Return the shared memory: queries, keys and lse of a head, and the rope key.

    Args:
        nope, rope: dims of a key.
        rope_per_head: every head has a rope key of its own.
    """
    bf16, fp32 = "bfloat16", "float32"
    return SimpleNamespace(
        q_nope=T.alloc_shared([STAGES, QUERIES, nope], bf16),
        q_rope=T.alloc_shared([STAGES, QUERIES, rope], bf16),
        k_nope=T.alloc_shared([STAGES, KEYS, nope], bf16),
        k_rope=T.alloc_shared([STAGES if rope_per_head else 1, KEYS, rope], bf16),
        lse=T.alloc_shared([STAGES, 1, QUERIES], fp32),
    )


def barriers():
    """Return the barriers of what is fetched, and of what the consumers have read."""
    return SimpleNamespace(
        k_rope=T.alloc_barrier(arrive_count=[32]),
        full=T.alloc_barrier(arrive_count=[32] * STAGES),
        free=T.alloc_barrier(arrive_count=[2 * GROUP] * STAGES),
    )


@T.macro
def fetch_rope_key(Kpe, m, done, at):
    """PRODUCE: the rope key of all heads."""
    fetch(Kpe[at.key : at.key + KEYS, :], m.k_rope[0, :, :], done.k_rope[0])
    T.barrier_arrive(done.k_rope[0])


@T.macro
def fetch_heads(Q, K, Lse, m, done, at, dims, rope_per_head=False):
    """PRODUCE: queries, keys and lse of ``at.heads`` heads, in Q and Lse from ``at.head`` on."""
    last = at.first + QUERIES
    for h in T.serial(at.heads):
        slot = h % STAGES
        head = at.head + h
        T.barrier_wait(done.free[slot], (h // STAGES & 1) ^ 1)
        fetch(Q[at.first : last, head, 0 : dims.nope], m.q_nope[slot, :, :], done.full[slot])
        fetch(Q[at.first : last, head, dims.nope : dims.qk], m.q_rope[slot, :, :], done.full[slot])
        fetch(K[at.key : at.key + KEYS, h, 0 : dims.nope], m.k_nope[slot, :, :], done.full[slot])
        if rope_per_head:
            fetch(
                K[at.key : at.key + KEYS, h, dims.nope : dims.qk],
                m.k_rope[slot, :, :],
                done.full[slot],
            )
        fetch(Lse[head, 0:1, at.first : last], m.lse[slot, :, :], done.full[slot])
        T.barrier_arrive(done.full[slot])


def rope_key(m, slot, rope_per_head):
    """Return the rope key of the head that is in ``slot``."""
    return m.k_rope[slot if rope_per_head else 0, :, :]


@T.macro
def add_heads(sums, m, done, at, scale, tx, rope_per_head=False):
    """CONSUME: the sums of the probabilities of all heads, for 64 queries per warpgroup."""
    s = T.alloc_fragment([QUERIES, KEYS], "float32")
    lse = T.alloc_local([2], "float32")
    for i in T.unroll(OWN):
        sums[i] = 0.0
    if not rope_per_head:
        T.barrier_wait(done.k_rope[0], 0)
    for h in T.serial(at.heads):
        slot = h % STAGES
        T.barrier_wait(done.full[slot], h // STAGES & 1)
        T.wgmma_gemm(
            m.q_nope[slot, :, :], m.k_nope[slot, :, :], s, transpose_B=True, clear_accum=True,
            policy=BY_ROWS,
        )  # fmt: skip
        T.wgmma_gemm(
            m.q_rope[slot, :, :], rope_key(m, slot, rope_per_head), s, transpose_B=True,
            policy=BY_ROWS,
        )  # fmt: skip
        for r in tuple(range(2)):
            lse[r] = m.lse[slot, 0, own_row(tx) + 8 * r]
        T.wait_wgmma(0)
        T.barrier_arrive(done.free[slot])
        call("dsa_add_head", sums.data, s.data, lse[0], lse[1], scale * LOG2_E, of=(KEYS // 8,))


@T.macro
def consume(Bits, Before, PSum, Keys, first_listed, m, done, at, scale, tx):
    """CONSUME: sums over the heads, and the write of those of selected keys."""
    sums = T.alloc_local([OWN], "float32")
    add_heads(sums, m, done, at, scale, tx)
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
            m, done = shared(nope, rope), barriers()
            tx = T.get_thread_binding()
            # Tiles of a block of queries come one after the other: the L2 cache holds these.
            place = T.alloc_local([2], "int32")
            place[0] = number // width
            if number % width < Count[place[0]]:
                place[1] = Tiles[place[0], number % width]
                at = SimpleNamespace(
                    first=place[0] * QUERIES, group=place[1], key=place[1] * KEYS, head=0,
                    heads=heads,
                )  # fmt: skip
                if tx >= 2 * GROUP:
                    T.set_max_nreg(REGISTERS[1], 0)
                    if tx < 2 * GROUP + 32:
                        fetch_rope_key(Kpe, m, done, at)
                        fetch_heads(Q, KV, Numbers, m, done, at, dims)
                else:
                    T.set_max_nreg(REGISTERS[0], 1)
                    consume(Bits, Before, PSum, Keys, first_listed, m, done, at, scale, tx)

    return masked_attention_probabilities


compiled = compiler(build, PASSES)
