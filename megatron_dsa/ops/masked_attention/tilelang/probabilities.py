"""Head sums of the probabilities of selected keys, two tiles per thread block (sm_90a).

:mod:`.head_sums` forms the sums. Per query, the sums of selected keys are written one after the
other.
"""

# No postponed annotations here: TileLang reads the tensors' shapes from them.
from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP
from megatron_dsa.ops.masked_attention.tilelang import head_sums
from megatron_dsa.ops.masked_attention.tilelang.head_sums import OWN, QUERIES, TILES
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    KEYS,
    PASSES,
    REGISTERS,
    THREADS,
    Dims,
    own_row,
)

SOURCE = (
    head_sums.SOURCE
    + r"""
// A thread block's block of queries, how many tiles of keys it has, and their groups: two that
// follow each other in the list of its queries, or the last of an odd number of them. These come
// last and fill the processors that have nothing else to do.
__device__ __forceinline__ void dsa_pair(int* place, const int* tiles, const int* count, int number,
                                         int blocks, int width) {
  asm volatile("" : "+r"(number));  // found where it is needed, not held: registers are short
  const int pairs = width / 2;
  const bool whole = number < blocks * pairs;
  const int block = whole ? number / pairs : number - blocks * pairs;
  const int listed = count[block], at = whole ? number % pairs * 2 : listed - 1;
  place[0] = block;
  place[1] = whole ? (at + 1 < listed) * 2 : listed % 2;
  if (place[1] > 0) {
    const int* list = tiles + static_cast<long long>(block) * width + at;
    place[2] = list[0];
    place[3] = list[place[1] - 1];
  }
}
// Writes the sums of the keys that row R of the thread selects, behind those of the `before` keys
// that it selects of earlier groups. `bits`: the four words of the row, in the order of key bits.
// With more than `width` keys the launch ends with an error.
template <int R>
__device__ __forceinline__ void dsa_write_sums(float* row, int width, const float* sums,
                                               const void* bits, int before) {
  const uint4 four = *static_cast<const uint4*>(bits);
  const unsigned words[4] = {four.x, four.y, four.z, four.w};
  // Not an assert: that is a call, and ptxas would serialise the products.
  if (before + __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w) > width)
    asm volatile("trap;");
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int b = 0; b < 4; b++) {
    // A byte of each word has two columns of four eights of columns: these 32 bits by column.
    unsigned some = 0;
#pragma unroll
    for (int l = 0; l < 4; l++) {
      unsigned x = words[l] >> 8 * b & 0xFF;
      x = (x | x << 12) & 0x000F000F;
      x = (x | x << 6) & 0x03030303;
      some |= x << 2 * l;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int column = 8 * n + 2 * lane;
      float* place = row + before + __popc(some & ((1u << column) - 1));
      const float* own = sums + 4 * (4 * b + n) + 2 * R;
      const bool first = some >> column & 1, second = some >> column & 2;
      if (first) place[0] = own[0];
      if (second) place[first] = own[1];
    }
    before += __popc(some);
  }
}
"""
)


@T.macro
def pair_of(Tiles, Count, number, heads):
    """Return the place of thread block ``number``: queries, and tiles of keys (none, 1 or 2)."""
    place = T.alloc_local([4], "int32")
    call(
        "dsa_pair", place.data, T.address_of(Tiles[0, 0]), T.address_of(Count[0]), number,
        Tiles.shape[0], Tiles.shape[1],
    )  # fmt: skip
    return SimpleNamespace(
        first=place[0] * QUERIES, n=place[1], groups=(place[2], place[3]), head=0, heads=heads,
        keys=(place[2] * KEYS, place[3] * KEYS),
    )  # fmt: skip


@T.macro
def consume(Bits, Before, PSum, Tiles, Count, m, done, began, number, scale, tx):
    """CONSUME: add up all heads, then write the sums of selected keys."""
    sums = T.alloc_local([TILES * OWN], "float32")
    head_sums.add_heads(sums, m, done, began, scale, tx)
    at = pair_of(Tiles, Count, number, began.heads)
    for tile in tuple(range(TILES)):
        for r in tuple(range(2)):
            row = at.first + own_row(tx) + 8 * r
            if tile < at.n and row < PSum.shape[0]:
                call(
                    "dsa_write_sums",
                    T.address_of(PSum[row, 0]),
                    PSum.shape[1],
                    T.address_of(sums[tile * OWN]),
                    T.address_of(Bits[row, at.groups[tile], 0]),
                    Before[row, at.groups[tile]],
                    of=(r,),
                )


def build(nope: int, rope: int, v: int):
    """Return the TileLang program for keys of ``nope`` dims and ``rope`` dims, values of ``v``.

    Its arguments (all contiguous; sizes are dynamic):
        Q ``[Sq, H, nope + rope]``, KV ``[Skv, H, nope + v]``, Kpe ``[Skv, rope]`` bf16; Numbers
        fp32 ``[H, 2, N]``, of which the lse in base 2 is read (``inf`` for queries without keys and
        past the last one); Bits int32 ``[Sq, G, 4]``, key bits; Before int32 ``[Sq, G]``, selected
        keys of earlier groups; Tiles int32 ``[ceil(Sq / 128), W]``, the groups of keys of each
        block of queries, and Count int32, how many; PSum fp32 ``[Sq, K]``, of which only
        entries of selected keys are written; scale, positive.

    Raises:
        ValueError: dims that the tiling does not fit.
    """
    dims = Dims(nope, rope, v)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    queries, keys, heads, count = T.dynamic("queries, keys, heads, count")
    groups, blocks, width, wanted = T.dynamic("groups, blocks, width, wanted")

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
        scale: T.float32,
    ):
        """One thread block per pair of tiles that may be; arguments as :func:`build` describes."""
        with T.Kernel(blocks * (width // 2 + 1), threads=THREADS) as number:
            T.import_source(SOURCE)
            m, done = head_sums.shared(dims), head_sums.barriers()
            tx = T.get_thread_binding()
            # Tiles of a block of queries come one after the other: the L2 cache holds these.
            at = pair_of(Tiles, Count, number, heads)
            if at.n > 0:
                if tx >= 2 * GROUP:
                    T.set_max_nreg(REGISTERS[1], 0)
                    if tx < 2 * GROUP + 32:
                        own = pair_of(Tiles, Count, number, heads)
                        head_sums.produce(Q, KV, Kpe, Numbers, m, done, own)
                else:
                    T.set_max_nreg(REGISTERS[0], 1)
                    consume(Bits, Before, PSum, Tiles, Count, m, done, at, number, scale, tx)

    return masked_attention_probabilities


compiled = compiler(build, PASSES)
