"""CUDA source for atomic adds of wgmma accumulators.

Among 16 columns, thread ``t`` (lane modulo 4) holds ``2t, 2t + 1, 8 + 2t, 9 + 2t``. In fp32 it adds
all four as one vector, stored as ``[4 threads, 2 halves, 2]``: shuffles would cost more than a
later pass over the result. In fixed point it adds single numbers, stored as ``[2 halves, 2, 4
threads]``, so that four threads add to neighbours.
"""

SOURCE = r"""
// Address of this thread's columns of a key; 0 for an invalid key.
template <typename Number>
__device__ __forceinline__ long long dsa_row(Number* base, int row, int stride, int column) {
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

// Adds a warpgroup's accumulator [64 keys, COLUMNS] to the keys' columns from FIRST on; `upper` and
// `lower` are addresses for the first and second eight rows of each warp.
template <int COLUMNS, int FIRST>
__device__ __forceinline__ void dsa_add_rows(const float* acc, long long upper, long long lower) {
  dsa_add<FIRST>(upper, acc[0], acc[1], acc[4], acc[5]);
  dsa_add<FIRST>(lower, acc[2], acc[3], acc[6], acc[7]);
  if constexpr (COLUMNS > 16) dsa_add_rows<COLUMNS - 16, FIRST + 16>(acc + 8, upper, lower);
}

template <int COLUMN>
__device__ __forceinline__ void dsa_add_fixed(long long row, float value, float units) {
  asm volatile(
    "{\n"
    ".reg .pred selected;\n"
    ".reg .s64 fixed;\n"
    "cvt.rni.s64.f32 fixed, %1;\n"
    "setp.ne.s64 selected, %0, 0;\n"
    "@selected red.global.add.u64 [%0 + %2], fixed;\n"
    "}" :: "l"(row), "f"(value * units), "n"(COLUMN * 8) : "memory");
}

// The same in 64-bit fixed point; `units`, a power of two, is the scale.
template <int COLUMNS, int FIRST>
__device__ __forceinline__ void dsa_add_fixed_rows(const float* acc, long long upper,
                                                   long long lower, float units) {
  dsa_add_fixed<FIRST>(upper, acc[0], units);
  dsa_add_fixed<FIRST + 4>(upper, acc[1], units);
  dsa_add_fixed<FIRST + 8>(upper, acc[4], units);
  dsa_add_fixed<FIRST + 12>(upper, acc[5], units);
  dsa_add_fixed<FIRST>(lower, acc[2], units);
  dsa_add_fixed<FIRST + 4>(lower, acc[3], units);
  dsa_add_fixed<FIRST + 8>(lower, acc[6], units);
  dsa_add_fixed<FIRST + 12>(lower, acc[7], units);
  if constexpr (COLUMNS > 16)
    dsa_add_fixed_rows<COLUMNS - 16, FIRST + 16>(acc + 8, upper, lower, units);
}

// Sums P over the heads of each query of a tile. `p`: a warpgroup's accumulator [64 keys, 64 query
// heads], HEADS per query; `sums`: [GROUP, width], for the next `keys` keys. SHARED: other thread
// blocks add further heads of the same query.
template <int HEADS, int GROUP, bool SHARED>
__device__ __forceinline__ void dsa_head_sums(const float* p, float* sums, int width, int keys,
                                              int thread) {
  const int lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = thread / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (GROUP == 1 || row / HEADS == g) sum += p[i / 2 * 4 + half * 2 + i % 2];
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == g % 4 && key < keys) {
        float* target = sums + (long long)g * width + key;
        if (SHARED) atomicAdd(target, sum);
        else *target = sum;
      }
    }
  }
}
"""
