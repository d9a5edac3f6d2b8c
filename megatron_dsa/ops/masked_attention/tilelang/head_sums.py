"""Head sums of probabilities for 128 queries and one or two tiles of 128 keys (sm_90a).

Two programs share this code and differ in what they write: :mod:`.probabilities` and
:mod:`megatron_dsa.ops.indexer_loss.tilelang.teacher`.

* ``CONSUME``: two warpgroups of 64 queries each add up the probabilities of all heads in their
  registers. They multiply in turns: while one does, the other forms probabilities;
* ``PRODUCE``: one warp that fetches queries, keys and lse in slabs of 64 dims. A head's queries are
  fetched once for both tiles. All heads share a rope key, or each has its own.
"""

# No postponed annotations here: TileLang reads the tensors' shapes from them.
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.tiles import GROUP, LOG2_E, SLAB
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    BY_ROWS,
    KEYS,
    STAGES,
    Dims,
    fetch,
    own_row,
)

#: Queries of a tile.
QUERIES = 128
#: Tiles of keys of a thread block, at most.
TILES = 2
#: Slabs of queries that are in shared memory at a time, and of keys: with two rope keys, which
#: stay there, 224 KiB. Two heads have at least as many slabs of queries, so that the lse of a head
#: is read before that of the next but one arrives.
SLOTS = 6
#: Scores of a thread, and sums of a tile.
OWN = QUERIES * KEYS // (2 * GROUP)

SOURCE = r"""
// sums += exp2(S * scale - lse)
template <int N>
__device__ __forceinline__ void dsa_add_head(float* sums, const float* s, float upper, float lower,
                                             float scale) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) sums[i] += exp2f(fmaf(s[i], scale, -(i % 4 / 2 ? lower : upper)));
}
"""


def shared(dims: Dims, rope_per_head: bool = False):
    """Return the shared memory: queries, keys and lse of what is streamed, and the rope keys.

    Args:
        dims: of the keys.
        rope_per_head: every head has a rope key of its own, behind its key without rope.
    """
    bf16, fp32 = "bfloat16", "float32"
    m = SimpleNamespace(slabs=dims.qk // SLAB)
    m.q = T.alloc_shared([SLOTS, QUERIES, SLAB], bf16)
    m.k = T.alloc_shared([SLOTS, KEYS, SLAB], bf16)
    #: Slabs of a head's keys that are streamed.
    m.key_slabs = (dims.qk if rope_per_head else dims.nope) // SLAB
    if not rope_per_head:
        m.k_rope = T.alloc_shared([TILES, KEYS, dims.rope], bf16)
    m.lse = T.alloc_shared([STAGES, 1, QUERIES], fp32)
    return m


def barriers():
    """Return the barriers of what is fetched, of what the consumers have read, and of turns.

    A warp of the consumers arrives at them once.
    """
    return SimpleNamespace(
        k_rope=T.alloc_barrier(arrive_count=[32]),
        full=T.alloc_barrier(arrive_count=[32] * SLOTS),
        q_free=T.alloc_barrier(arrive_count=[2 * GROUP // 32] * SLOTS),
        k_free=T.alloc_barrier(arrive_count=[2 * GROUP // 32] * SLOTS),
        turn=T.alloc_barrier(arrive_count=[GROUP // 32] * 2),
    )


def step_of(at, h, tile):
    """Return how many products of tiles come before that of a head and a tile."""
    return T.cast(h * at.n + tile, "uint32")  # unsigned: remainders take fewer instructions


def place_of_slab(count, before, slab):
    """Return the slot of a slab, and how often its ring was filled before.

    Args:
        count: slabs of each head or product.
        before: heads or products before.
        slab: which slab.
    """
    if SLOTS % count == 0:  # the remainder by a smaller number, or a bit
        wholes = SLOTS // count
        return before % wholes * count + slab, before // wholes
    i = before * count + slab
    return i % SLOTS, i // SLOTS


@T.macro
def produce_queries(Q, Lse, m, done, at, h, slab, slot):
    """Fetch a slab of a head's queries with the keys in ``slot``; lse comes with the first one."""
    last, place = at.first + QUERIES, place_of_slab(m.slabs, h, slab)
    T.barrier_wait(done.q_free[place[0]], (place[1] & 1) ^ 1)
    fetch(
        Q[at.first : last, at.head + h, slab * SLAB : slab * SLAB + SLAB], m.q[place[0], :, :],
        done.full[slot],
    )  # fmt: skip
    if slab == 0:
        fetch(Lse[at.head + h, 0:1, at.first : last], m.lse[h % STAGES, :, :], done.full[slot])


@T.macro
def produce_tile(Q, K, Lse, m, done, at, h, tile):
    """Fetch a head's keys of a tile; the head's queries come with those of the first tile."""
    for slab in tuple(range(m.key_slabs)):
        slot, rounds = place_of_slab(m.key_slabs, step_of(at, h, tile), slab)
        T.barrier_wait(done.k_free[slot], (rounds & 1) ^ 1)
        key, column = at.keys[tile], slab * SLAB
        fetch(
            K[key : key + KEYS, h, column : column + SLAB], m.k[slot, :, :], done.full[slot]
        )  # fmt: skip
        if tile == 0:
            produce_queries(Q, Lse, m, done, at, h, slab, slot)
            if slab == m.key_slabs - 1:
                for rest in tuple(range(m.key_slabs, m.slabs)):
                    produce_queries(Q, Lse, m, done, at, h, rest, slot)
        T.barrier_arrive(done.full[slot])


@T.macro
def produce(Q, K, Kpe, Lse, m, done, at):
    """PRODUCE: the rope keys of all heads, then queries, keys and lse of each head.

    Heads are ``at.heads`` of K, from the first on, and of Q and Lse from ``at.head`` on. Tiles of
    keys are ``at.n``, of which ``at.keys`` are the first keys.
    """
    if m.key_slabs < m.slabs:
        for tile in tuple(range(TILES)):
            if tile < at.n:
                fetch(
                    Kpe[at.keys[tile] : at.keys[tile] + KEYS, :], m.k_rope[tile, :, :],
                    done.k_rope[0],
                )  # fmt: skip
        T.barrier_arrive(done.k_rope[0])
    for h in T.serial(at.heads):
        for tile in tuple(range(TILES)):
            if tile < at.n:
                produce_tile(Q, K, Lse, m, done, at, h, tile)


@T.macro
def release(m, done, at, h, tile, slab, tx):
    """Free the slab of keys, and that of queries after the last tile."""
    T.sync_warp()
    if tx % 32 == 0:
        if slab < m.key_slabs:
            step = step_of(at, h, tile)
            T.barrier_arrive(done.k_free[place_of_slab(m.key_slabs, step, slab)[0]])
        if tile + 1 == at.n:
            T.barrier_arrive(done.q_free[place_of_slab(m.slabs, h, slab)[0]])


@T.macro
def multiply(m, done, s, lse, at, h, tile, tx):
    """``S = Q K^T`` of a head and a tile; a slab is free while the next one is multiplied.

    The other warpgroup's turn begins with the last slab, so that products follow on each other.
    """
    step, group = step_of(at, h, tile), tx // GROUP
    for slab in tuple(range(m.slabs)):
        q, _ = place_of_slab(m.slabs, h, slab)
        k, rounds = place_of_slab(m.key_slabs, step, slab)
        if slab < m.key_slabs:
            T.barrier_wait(done.full[k], rounds & 1)
        if slab == 0:
            T.barrier_wait(done.turn[group], step + group + 1 & 1)
        if slab < m.key_slabs:
            T.wgmma_gemm(
                m.q[q, :, :], m.k[k, :, :], s, transpose_B=True, clear_accum=slab == 0,
                policy=BY_ROWS,
            )  # fmt: skip
        else:
            T.wgmma_gemm(m.q[q, :, :], m.k_rope[tile, :, :], s, transpose_B=True, policy=BY_ROWS)
        if slab == 0 and tile == 0:
            for r in tuple(range(2)):
                lse[r] = m.lse[h % STAGES, 0, own_row(tx) + 8 * r]
        if slab > 0:
            T.wait_wgmma(1)
            release(m, done, at, h, tile, slab - 1, tx)
        if slab == m.slabs - 1:  # noqa: SIM102
            if tx % 32 == 0:
                T.barrier_arrive(done.turn[1 - group])
    T.wait_wgmma(0)
    release(m, done, at, h, tile, m.slabs - 1, tx)


@T.macro
def add_heads(sums, m, done, at, scale, tx):
    """CONSUME: add up the probabilities of all heads, for 64 queries per warpgroup."""
    s = T.alloc_fragment([QUERIES, KEYS], "float32")
    lse = T.alloc_local([2], "float32")
    for i in T.unroll(TILES * OWN):
        sums[i] = 0.0
    if m.key_slabs < m.slabs:
        T.barrier_wait(done.k_rope[0], 0)
    for h in T.serial(at.heads):
        for tile in tuple(range(TILES)):
            if tile < at.n:
                multiply(m, done, s, lse, at, h, tile, tx)
                call(
                    "dsa_add_head", T.address_of(sums[tile * OWN]), s.data, lse[0], lse[1],
                    scale * LOG2_E, of=(KEYS // 8,),
                )  # fmt: skip
