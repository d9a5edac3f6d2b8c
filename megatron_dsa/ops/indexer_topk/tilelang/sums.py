"""CUDA for index scores: weighted sums of ``[keys, query heads]`` accumulators over heads.

A thread sums a quarter of each query's heads for two keys, then four threads add their sums.
``ENGINE`` selects the order of :mod:`megatron_dsa.ops.indexer_topk.engine`.
"""

#: Relu variants: none; ``max(x, 0)``, which has half the throughput; ``max`` alternating with ``x +
#: |x|`` and half the weight.
RELU_NONE, RELU_MAX, RELU_MIXED = 0, 1, 2

SOURCE = r"""
template <int RELU>
__device__ __forceinline__ constexpr bool dsa_added(int column) {
  return RELU == 2 && column % 2;
}
template <int RELU>
__device__ __forceinline__ float dsa_relu(float x, int column) {
  return RELU == 0 ? x : dsa_added<RELU>(column) ? x + fabsf(x) : fmaxf(x, 0.f);
}
// Weights of this thread's columns 8 j + 2 (lane % 4) + {0, 1} of an accumulator, for the COLUMNS
// rows of q from `row` on.
template <int COLUMNS, int RELU>
__device__ __forceinline__ void dsa_weights(float* weights, const float* source, int row,
                                            int rows) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    const int mine = row + 8 * j + 2 * (threadIdx.x % 4);
    float2 pair = make_float2(0.f, 0.f);
    if (mine < rows) pair = *reinterpret_cast<const float2*>(source + mine);
    weights[2 * j] = pair.x;
    weights[2 * j + 1] = dsa_added<RELU>(1) ? 0.5f * pair.y : pair.y;
  }
}
// Adds `sums` [QUERIES, 2 keys] of two threads; each keeps half of the queries, or of the keys if
// there is one query, chosen by bit `BIT` of its index.
template <int QUERIES, int BIT>
__device__ __forceinline__ void dsa_halve(float* sums) {
  const bool upper = threadIdx.x & BIT;
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    const float mine = upper ? sums[i + QUERIES] : sums[i];
    const float other = upper ? sums[i] : sums[i + QUERIES];
    sums[i] = mine + __shfl_xor_sync(~0u, other, BIT);
  }
}
// Part of an accumulator that a thread writes: OWN queries and 2 / PARTS keys, 8 apart.
template <int HEADS, int COLUMNS, bool ENGINE>
struct dsa_part {
  static constexpr int QUERIES = COLUMNS / HEADS, OWN = QUERIES < 4 ? 1 : QUERIES / 4;
  static constexpr int PARTS = QUERIES < 4 ? 2 : 1;
  // Index among four threads; the higher bit selects first in dsa_halve.
  static __device__ __forceinline__ int quad() {
    const int quad = threadIdx.x % 4;
    return ENGINE ? quad % 2 * 2 + quad / 2 : quad;
  }
  // First query and first key of this part.
  static __device__ __forceinline__ int query() {
    return QUERIES < 4 ? quad() / 2 : quad() * OWN;
  }
  static __device__ __forceinline__ int key() {
    const int key = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    return PARTS == 2 ? key + quad() % 2 * 8 : key;
  }
};
// Keeps a value in a register; otherwise the loop would recompute it.
__device__ __forceinline__ void dsa_keep_value(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void dsa_keep_value(int64_t& value) { asm volatile("" : "+l"(value)); }
// Addresses of the first block's scores, and ranges of visible columns relative to this thread's
// key; the range is empty for queries past the end.
template <int HEADS, int COLUMNS, bool ENGINE>
__device__ __forceinline__ void dsa_rows(int64_t* target, int* seen, float* scores, int64_t stride,
                                         const int* start, const int* end, int query, int rows) {
  using part = dsa_part<HEADS, COLUMNS, ENGINE>;
#pragma unroll
  for (int i = 0; i < part::OWN; i++) {
    const int row = query + part::query() + i, key = part::key();
    const bool real = row < rows;
    target[i] = reinterpret_cast<int64_t>(scores + row * stride + key);
    seen[2 * i] = (real ? start[row] : 0) - key;
    seen[2 * i + 1] = (real ? end[row] : 0) - key;
    dsa_keep_value(target[i]);
    dsa_keep_value(seen[2 * i]);
    dsa_keep_value(seen[2 * i + 1]);
  }
}
// Scales of this thread's keys.
template <int HEADS, int COLUMNS, bool ENGINE>
__device__ __forceinline__ void dsa_scales(float* scales, const float* source, int first,
                                           int keys) {
  using part = dsa_part<HEADS, COLUMNS, ENGINE>;
#pragma unroll
  for (int i = 0; i < 2 / part::PARTS; i++)
    scales[i] = __ldg(source + min(first + part::key() + 8 * i, keys - 1));
}
// A branch would make ptxas wait for products in flight.
__device__ __forceinline__ void dsa_store(int64_t target, float score, bool wanted) {
  asm volatile(
    "{\n"
    ".reg .pred wanted;\n"
    "setp.ne.s32 wanted, %2, 0;\n"
    "@wanted st.global.f32 [%0], %1;\n"
    "}" :: "l"(target), "f"(score), "r"((int)wanted) : "memory");
}
// Writes the weighted sums of an accumulator [64 keys, COLUMNS rows of q] to visible columns from
// `first` on.
template <int HEADS, int COLUMNS, bool ENGINE, int RELU, bool SCALED>
__device__ __forceinline__ void dsa_write(float* acc, const float* weights, const float* scales,
                                          const int64_t* target, const int* seen, int first) {
  using part = dsa_part<HEADS, COLUMNS, ENGINE>;
  // Keep the sums after the wait for the product.
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
  float sums[2 * part::QUERIES];
#pragma unroll
  for (int q = 0; q < part::QUERIES; q++) {
    float low = 0.f, high = 0.f, odd_low = 0.f, odd_high = 0.f;
#pragma unroll
    for (int j = 0; j < HEADS / 8; j++) {
      const bool swapped = ENGINE && HEADS > 8 && j < 2;
      const int i = q * (HEADS / 8) + (swapped ? 1 - j : j);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float low_relu = dsa_relu<RELU>(acc[4 * i + c], c);
        const float high_relu = dsa_relu<RELU>(acc[4 * i + 2 + c], c);
        if (ENGINE) {  // explicit, because the compiler may contract a product and a sum
          float& one = c ? odd_low : low;
          float& other = c ? odd_high : high;
          one = __fmaf_rn(weights[2 * i + c], low_relu, one);
          other = __fmaf_rn(weights[2 * i + c], high_relu, other);
        } else {
          low += weights[2 * i + c] * low_relu;
          high += weights[2 * i + c] * high_relu;
        }
      }
    }
    sums[2 * q] = ENGINE ? low + odd_low : low;
    sums[2 * q + 1] = ENGINE ? high + odd_high : high;
  }
  dsa_halve<part::QUERIES, ENGINE ? 1 : 2>(sums);
  dsa_halve<part::QUERIES / 2, ENGINE ? 2 : 1>(sums);
#pragma unroll
  for (int i = 0; i < part::OWN; i++)
#pragma unroll
    for (int k = 0; k < 2 / part::PARTS; k++) {
      const int column = first + 8 * k;
      float score = sums[2 / part::PARTS * i + k];
      if (SCALED) score *= scales[k];
      dsa_store(target[i] + 4ll * column, score, column >= seen[2 * i] && column < seen[2 * i + 1]);
    }
}
"""
