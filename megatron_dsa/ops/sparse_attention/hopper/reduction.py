"""CUDA for what TileLang cannot say: vector reductions from wgmma accumulators to global memory.

A thread of a warpgroup holds, of each 16 columns of its row of an accumulator, columns
``2t, 2t + 1, 8 + 2t, 9 + 2t`` (``t``: lane modulo 4). They are added as one vector of four floats,
so the 16 columns are stored as ``[4 threads, 2 halves, 2]``; see
:func:`megatron_dsa.ops.sparse_attention.fragments.in_column_order`. Shuffling them into order first
costs more than one pass over the result.
"""

SOURCE = r"""
// Where this thread adds to a row; 0 where the row is no key.
__device__ __forceinline__ long long dsa_row(float* base, int row, int stride, int column) {
  return row < 0 ? 0ll : reinterpret_cast<long long>(base + (long long)row * stride + column);
}

template <int FIRST>
__device__ __forceinline__ void dsa_add(long long row, float x, float y, float z, float w) {
  asm volatile(
    "{\n"
    ".reg .pred selected;\n"
    "setp.ne.s64 selected, %0, 0;\n"
    "@selected red.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};\n"
    "}" :: "l"(row), "f"(x), "f"(y), "f"(z), "f"(w), "n"(FIRST * 4) : "memory");
}

// Adds an accumulator [64, COLUMNS] of one warpgroup to columns FIRST... of the rows that its
// threads hold: `upper` in the first, `lower` in the second eight rows of each warp.
template <int COLUMNS, int FIRST>
__device__ __forceinline__ void dsa_add_rows(const float* acc, long long upper, long long lower) {
  dsa_add<FIRST>(upper, acc[0], acc[1], acc[4], acc[5]);
  dsa_add<FIRST>(lower, acc[2], acc[3], acc[6], acc[7]);
  if constexpr (COLUMNS > 16) dsa_add_rows<COLUMNS - 16, FIRST + 16>(acc + 8, upper, lower);
}
"""
