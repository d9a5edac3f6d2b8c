"""CUDA source of the Hopper backward kernels.

Addresses in shared memory are integers: given a pointer in a loop, TileLang inserts a memory
barrier before each product. dS uses P in fp16, in units of :data:`P_UNIT`, because bf16 would
double the rounding error.
"""

from megatron_dsa.ops.hopper.cuda import ADDRESSES

#: Unit in which probabilities up to 2 fit fp16.
P_UNIT = 2.0**-14

SOURCE = (
    ADDRESSES
    + f"""
#define DSA_P_UNITS {1 / P_UNIT:.1f}f
"""
    + r"""
// A quarter of the dot product of row `row` of two matrices of COLUMNS bf16.
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
// Load and store halves (32 rows) of a tile [64 keys, 64 rows] bf16 with 128-byte swizzle as
// accumulators of a warpgroup. `place`: address of this thread's row, from dsa_place.
__device__ __forceinline__ int dsa_place(int tile, int thread) {
  const int lane = thread % 32, key = thread / 32 * 16 + lane % 16;
  return tile + key * 128 + ((lane / 16 ^ key % 8) << 4);
}
// Hides the address from ptxas, which would hold sums with it in registers over a loop.
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
// Loads a tile [64 keys, 64 rows] bf16 as the operand of a product with the rows.
__device__ __forceinline__ void dsa_load_tile(void* operand, int place) {
  unsigned* pairs = static_cast<unsigned*>(operand);
#pragma unroll
  for (int i = 0; i < 4; i++, pairs += 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(dsa_laundered(place) ^ (i * 32)) : "memory");
}
// Stores half of P in fp16, in units of P_UNIT.
template <int HALF>
__device__ __forceinline__ void dsa_store_p(const float* acc, int place) {
#pragma unroll
  for (int i = 2 * HALF; i < 2 * HALF + 2; i++) {
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(pairs[j])
        : "f"(acc[8 * i + 2 * j + 1] * DSA_P_UNITS), "f"(acc[8 * i + 2 * j] * DSA_P_UNITS));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(dsa_laundered(place) ^ (i * 32)), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
         "r"(pairs[3]) : "memory");
  }
}
// P = exp2(S factor - lse) of half the rows; `lse` of this thread's 16 rows. Invalid entries have
// zero keys, so any finite P is harmless: dQ adds zeros, and dKV skips them. (NaN scores also give
// a finite P; dP makes their gradients NaN.)
template <int HALF>
__device__ __forceinline__ void dsa_probabilities(float* acc, const float* lse, float factor) {
#pragma unroll
  for (int i = 16 * HALF; i < 16 * HALF + 16; i++) {
    acc[i] = fminf(acc[i] * factor - lse[i / 4 * 2 + i % 2], 1.f);
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(acc[i]));
  }
}
// acc = acc scale - delta; `delta`: shared-memory address of this thread's first row, scaled.
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
// Stores acc * P. `place`: dsa_place in the tile of dS, which holds P.
template <int HALF>
__device__ __forceinline__ void dsa_times_p(float* acc, int place) {
#pragma unroll
  for (int i = 2 * HALF; i < 2 * HALF + 2; i++) {
    unsigned pairs[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(dsa_laundered(place) ^ (i * 32)) : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float x, y;
      asm("{\n"
          ".reg .b16 low, high;\n"
          "mov.b32 {low, high}, %2;\n"
          "cvt.f32.f16 %0, low;\n"
          "cvt.f32.f16 %1, high;\n"
          "}" : "=f"(x), "=f"(y) : "r"(pairs[j]));
      acc[8 * i + 2 * j] *= x;
      acc[8 * i + 2 * j + 1] *= y;
    }
  }
  dsa_store_half<HALF>(acc, place);
}
"""
)
