"""Kernel for the probabilities of selected keys, summed over heads (sm_90a)."""

from types import SimpleNamespace

from tilelang import language as T

from megatron_dsa.ops.hopper.cuda import call
from megatron_dsa.ops.hopper.programs import compiler
from megatron_dsa.ops.hopper.tiles import GROUP
from megatron_dsa.ops.masked_attention.tilelang import head_sums
from megatron_dsa.ops.masked_attention.tilelang.head_sums import QUERIES, SUMS_PER_THREAD
from megatron_dsa.ops.masked_attention.tilelang.tiles import (
    KEYS,
    PASSES,
    REGISTERS,
    THREADS,
    Dims,
    thread_row,
)

SOURCE = (
    head_sums.SOURCE
    + r"""
// Writes the sums of the keys that row R of the thread selects, after the `before` selected keys of
// earlier groups. `bits`: four words of the row, in the order of key bits. Traps with more than
// `width` keys.
template <int R>
__device__ __forceinline__ void dsa_write_sums(float* row, int width, const float* sums,
                                               const void* bits, int before) {
  const uint4 four = *static_cast<const uint4*>(bits);
  const unsigned words[4] = {four.x, four.y, four.z, four.w};
  // An assert is a call, for which ptxas would serialise the products.
  if (before + __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w) > width)
    asm volatile("trap;");
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
  }
}
"""
)


@T.macro
def consume(Bits, Before, PSum, m, done, at, dims, scale, tx):
    sums = T.alloc_local([SUMS_PER_THREAD], "float32")
    head_sums.add_heads(sums, m, done, at, dims, scale, tx)
    for r in tuple(range(2)):
        query = at.first + thread_row(tx) + 8 * r
        if query < PSum.shape[0]:
            call(
                "dsa_write_sums",
                T.address_of(PSum[query, 0]),
                PSum.shape[1],
                sums.data,
                T.address_of(Bits[query, at.group, 0]),
                Before[query, at.group],
                of=(r,),
            )


def build(nope: int, rope: int, v: int):
    """Return the TileLang program that sums probabilities over heads.

    Arguments as in :func:`.forward.build`. Numbers: result of ``numbers``. Before: number of
    selected keys in earlier groups. The first ``part`` queries have KV's heads from ``key_head``
    on, every further ``part`` the next heads.
    """
    dims = Dims(nope, rope, v)
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    queries, keys, heads, count = T.dynamic("queries, keys, heads, count")
    key_heads = T.dynamic("key_heads")
    groups, blocks, width, wanted = T.dynamic("groups, blocks, width, wanted")

    @T.prim_func
    def masked_attention_probabilities(
        Q: T.Tensor([queries, heads, nope + rope], bf16),
        KV: T.Tensor([keys, key_heads, nope + v], bf16),
        Kpe: T.Tensor([keys, rope] if rope else [1, 1], bf16),
        Numbers: T.Tensor([heads, 2, count], fp32),
        Bits: T.Tensor([queries, groups, 4], int32),
        Before: T.Tensor([queries, groups], int32),
        Tiles: T.Tensor([blocks, width], int32),
        Count: T.Tensor([blocks], int32),
        PSum: T.Tensor([queries, wanted], fp32),
        key_head: T.int32,
        part: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(blocks * width, threads=THREADS) as number:
            T.import_source(SOURCE)
            m, done = head_sums.shared(dims), head_sums.barriers(dims)
            tx = T.get_thread_binding()
            # Tiles with the same queries are adjacent, so these queries stay in L2.
            work = T.alloc_local([3], "int32")
            work[0] = number // width
            work[2] = key_head + work[0] * QUERIES // part * heads
            if number % width < Count[work[0]]:
                work[1] = Tiles[work[0], number % width]
                at = SimpleNamespace(
                    first=work[0] * QUERIES, group=work[1], key=work[1] * KEYS, head=0,
                    key_head=work[2], heads=heads,
                )  # fmt: skip
                if tx >= 2 * GROUP:
                    T.set_max_nreg(REGISTERS[1], 0)
                    if tx < 2 * GROUP + 32:
                        head_sums.produce(Q, KV, Kpe, Numbers, m, done, at, dims)
                else:
                    T.set_max_nreg(REGISTERS[0], 1)
                    consume(Bits, Before, PSum, m, done, at, dims, scale, tx)

    return masked_attention_probabilities


compiled = compiler(build, PASSES)
