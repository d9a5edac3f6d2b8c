"""Teacher of the dense indexer loss, 128 queries x 128 keys per thread block (sm_90a)."""

# Postponed annotations would hide shapes from TileLang.
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
// Sets `heads` to 0 if no key of the tile is visible. All threads must call it.
__device__ __forceinline__ void dsa_heads_to_add(int* heads, const int* start, const int* end,
                                                 int row, int rows, int key, int keys) {
  row += threadIdx.x % 128;
  bool seen = false;
  if (row < rows) {
    const int from = max(start[row], key), to = min(end[row], key + keys);
    seen = from < to;
  }
  if (!__syncthreads_or(seen)) *heads = 0;
}
// Writes (or adds, if `add`) row R of the thread; columns outside [from, to) become 0.
template <int N, int R>
__device__ __forceinline__ void dsa_write_row(float* row, const float* sums, int from, int to,
                                              bool add) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int column = 8 * n + threadIdx.x % 4 * 2;
    float2* place = reinterpret_cast<float2*>(row + column);
    // Select instead of multiplying: hidden columns may be NaN.
    float2 value = {column >= from && column < to ? sums[4 * n + 2 * R] : 0.f,
                    column + 1 >= from && column + 1 < to ? sums[4 * n + 2 * R + 1] : 0.f};
    if (add) value = {value.x + place->x, value.y + place->y};
    *place = value;
  }
}
"""
)


@T.macro
def consume(Start, End, Out, m, done, at, dims, scale, tx):
    sums = T.alloc_local([SUMS_PER_THREAD], "float32")
    seen = T.alloc_local([2], "int32")
    head_sums.add_heads(sums, m, done, at, dims, scale, tx)
    for r in tuple(range(2)):
        query = at.first + thread_row(tx) + 8 * r
        seen[0] = 0
        seen[1] = 0
        if query < Start.shape[0]:
            seen[0] = Start[query] - at.key
            seen[1] = End[query] - at.key
        call(
            "dsa_write_row", T.address_of(Out[query, at.key]), sums.data, seen[0], seen[1],
            at.head > 0, of=(KEYS // 8, r),
        )  # fmt: skip


def build(nope: int, rope: int, behind: int, rope_per_head: bool):
    """Return the TileLang program for keys of ``nope`` dims and ``rope`` dims.

    A launch processes K's heads, which begin at head ``first`` of Q and Lse. The kernel adds to
    ``Out`` unless ``first`` is 0.

    Arguments (contiguous, sizes dynamic):
        Q ``[r, H, nope + rope]``, K ``[w, heads, nope + behind]``, per head the key without rope,
        then (``rope_per_head``) its rope key, then the value; Kpe ``[w, rope]``, a shared rope key
        (``rope_per_head``: ``[1, rope]``, not read), bf16; Lse fp32 ``[H, 1, N]`` in base 2, ``N``
        at least ``r`` and a multiple of 4; Start, End int32 ``[r]``, visible columns; Out fp32
        ``[r, w]`` in whole tiles, 0 at hidden keys; scale, positive.

    Raises:
        ValueError: the tiling does not fit the dims.
    """
    dims = Dims.of_keys(nope, rope)
    if rope_per_head and behind < rope:
        raise ValueError(f"behind must be at least the {rope} dims of the rope key, got {behind}")
    bf16, fp32, int32 = "bfloat16", "float32", "int32"
    queries, keys, ropes, all_heads, heads = T.dynamic("queries, keys, ropes, all_heads, heads")
    count, height, width = T.dynamic("count, height, width")

    @T.prim_func
    def dense_teacher(
        Q: T.Tensor([queries, all_heads, nope + rope], bf16),
        K: T.Tensor([keys, heads, nope + behind], bf16),
        Kpe: T.Tensor([ropes, rope], bf16),
        Lse: T.Tensor([all_heads, 1, count], fp32),
        Start: T.Tensor([queries], int32),
        End: T.Tensor([queries], int32),
        Out: T.Tensor([height, width], fp32),
        first: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(height // QUERIES * (width // KEYS), threads=THREADS) as number:
            T.import_source(SOURCE)
            m, done = head_sums.shared(dims, rope_per_head), head_sums.barriers(dims)
            tx = T.get_thread_binding()
            origin = T.alloc_local([2], "int32")
            origin[0] = number // (width // KEYS) * QUERIES
            origin[1] = number % (width // KEYS) * KEYS
            some = T.alloc_local([1], "int32")
            some[0] = heads
            call(
                "dsa_heads_to_add", some.data, T.address_of(Start[0]), T.address_of(End[0]),
                origin[0], queries, origin[1], KEYS,
            )  # fmt: skip
            at = SimpleNamespace(
                first=origin[0], key=origin[1], head=first, key_head=0, heads=some[0]
            )
            if tx >= 2 * GROUP:
                T.set_max_nreg(REGISTERS[1], 0)
                if tx < 2 * GROUP + 32:
                    head_sums.produce(Q, K, Kpe, Lse, m, done, at, dims)
            else:
                T.set_max_nreg(REGISTERS[0], 1)
                consume(Start, End, Out, m, done, at, dims, scale, tx)

    return dense_teacher


compiled = compiler(build, PASSES)
