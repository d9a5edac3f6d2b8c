"""CUDA for the backwards: delta, and P and dS from accumulators to shared memory.

Addresses in shared memory are plain integers here: given a pointer inside a loop, TileLang puts a
memory barrier before each product. ``delta = rowsum(dO * O)``.
"""

from megatron_dsa.ops.hopper.cuda import ADDRESSES

SOURCE = (
    ADDRESSES
    + r"""
// A quarter of the sum of products of row `row` of two matrices of COLUMNS bf16.
template <int COLUMNS>
__device__ __forceinline__ float dsa_row_product(const void* a, const void* b, int row,
                                                 int quarter) {
  const long long begin = (long long)row * (COLUMNS / 8) + quarter;
  const uint4* x = static_cast<const uint4*>(a) + begin;
  const uint4* y = static_cast<const uint4*>(b) + begin;
  float sum = 0.f;
#pragma unroll
  for (int first = 0; first < COLUMNS / 8; first += 32) {
    uint4 u[8], v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) { u[i] = x[first + 4 * i]; v[i] = y[first + 4 * i]; }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const unsigned* p = reinterpret_cast<const unsigned*>(&u[i]);
      const unsigned* q = reinterpret_cast<const unsigned*>(&v[i]);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sum += __uint_as_float(p[j] << 16) * __uint_as_float(q[j] << 16);
        sum += __uint_as_float(p[j] & 0xffff0000u) * __uint_as_float(q[j] & 0xffff0000u);
      }
    }
  }
  return sum;
}
// Halves (32 rows each) of a tile [64 keys, 64 rows] bf16 with 128-byte swizzle, to and from the
// accumulators of a warpgroup. `place`: dsa_place of the tile, where this thread's row begins.
__device__ __forceinline__ int dsa_place(int tile, int thread) {
  const int lane = thread % 32, key = thread / 32 * 16 + lane % 16;
  return tile + key * 128 + ((lane / 16 ^ key % 8) << 4);
}
// Kept in a register over a loop, sums with an address cost registers that are not there.
__device__ __forceinline__ int dsa_laundered(int address) {
  asm volatile("" : "+r"(address));
  return address;
}
template <int HALF>
__device__ __forceinline__ void dsa_store_half(const float* acc, int place) {
#pragma unroll
  for (int i = 2 * HALF; i < 2 * HALF + 2; i++) {
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(pairs[j]) : "f"(acc[8 * i + 2 * j + 1]), "f"(acc[8 * i + 2 * j]));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(dsa_laundered(place) ^ (i * 32)), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
         "r"(pairs[3]) : "memory");
  }
}
// Stores what dsa_store_half loses of the values.
template <int HALF>
__device__ __forceinline__ void dsa_store_errors(const float* acc, int place) {
#pragma unroll
  for (int i = 2 * HALF; i < 2 * HALF + 2; i++) {
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x = acc[8 * i + 2 * j], y = acc[8 * i + 2 * j + 1];
      unsigned rounded;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(y), "f"(x));
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(pairs[j])
        : "f"(y - __uint_as_float(rounded & 0xffff0000u)), "f"(x - __uint_as_float(rounded << 16)));
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(dsa_laundered(place) ^ (i * 32)), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
         "r"(pairs[3]) : "memory");
  }
}
// P = exp2(S factor - lse) of half the rows; `lse` of this thread's 16 rows. Entries that select
// nothing have zeros as key, so any finite P will do: their dS meets that zero key in dQ, and no
// row of dKV. (A score that is NaN gives a finite P, too; dP makes its gradients NaN.)
template <int HALF>
__device__ __forceinline__ void dsa_probabilities(float* acc, const float* lse, float factor) {
#pragma unroll
  for (int i = 16 * HALF; i < 16 * HALF + 16; i++) {
    acc[i] = fminf(acc[i] * factor - lse[i / 4 * 2 + i % 2], 1.f);
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(acc[i]));
  }
}
// acc = acc scale - delta; `delta` in shared memory, times scale, of this thread's first row.
__device__ __forceinline__ void dsa_less_delta(float* acc, int delta, float scale) {
  delta = dsa_laundered(delta);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float x, y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(delta + j * 32));
    acc[4 * j] = acc[4 * j] * scale - x;
    acc[4 * j + 1] = acc[4 * j + 1] * scale - y;
    acc[4 * j + 2] = acc[4 * j + 2] * scale - x;
    acc[4 * j + 3] = acc[4 * j + 3] * scale - y;
  }
}
// Stores acc * P. `p`, `place`: dsa_place in the tile of P and in that of dS, which holds what
// dsa_store_errors has stored of P if ERRORS.
template <int HALF, bool ERRORS>
__device__ __forceinline__ void dsa_times_p(float* acc, int p, int place) {
#pragma unroll
  for (int i = 2 * HALF; i < 2 * HALF + 2; i++) {
    unsigned pairs[4], errors[4] = {0, 0, 0, 0};
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(dsa_laundered(p) ^ (i * 32)) : "memory");
    if (ERRORS)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(errors[0]), "=r"(errors[1]), "=r"(errors[2]), "=r"(errors[3])
        : "r"(dsa_laundered(place) ^ (i * 32)) : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float x = __uint_as_float(pairs[j] << 16), y = __uint_as_float(pairs[j] & 0xffff0000u);
      if (ERRORS) {
        x += __uint_as_float(errors[j] << 16);
        y += __uint_as_float(errors[j] & 0xffff0000u);
      }
      acc[8 * i + 2 * j] *= x;
      acc[8 * i + 2 * j + 1] *= y;
    }
  }
  dsa_store_half<HALF>(acc, place);
}
"""
)
