"""CUDA functions of the backward, which work on a thread's registers.

A thread holds two lines of an accumulator as ``[columns / 8][2 lines][2 neighbours]``. Lines are
keys and columns queries, except in dQ. Bit ``2 n + e`` of a line's word masks column ``(n, e)``.
"""

from megatron_dsa.ops.hopper.cuda import ADDRESSES

SOURCE = (
    ADDRESSES
    + r"""
// Reads two adjacent floats of shared memory.
__device__ __forceinline__ float2 dsa_two(int address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
// P = exp2(S * scale - lse) of selected queries, else 0, in place.
template <int N>
__device__ __forceinline__ void dsa_probabilities(float* s, int lse, unsigned upper, unsigned lower,
                                                  float scale) {
  lse += threadIdx.x % 4 * 8;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float2 own = dsa_two(lse + 32 * n);
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; i++) {
      const unsigned word = i % 4 / 2 ? lower : upper;
      const float p = exp2f(fmaf(s[i], scale, -(i % 2 ? own.y : own.x)));
      s[i] = word & 1u << (i / 4 * 2 + i % 2) ? p : 0;
    }
  }
}
// dS = P * (dP - delta), overwriting dP, with P in bf16.
template <int N>
__device__ __forceinline__ void dsa_score_gradient(const void* bf16, float* dp, int delta) {
  delta += threadIdx.x % 4 * 8;
  const unsigned* p = static_cast<const unsigned*>(bf16);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float2 own = dsa_two(delta + 32 * n);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const unsigned two = p[2 * n + r];
      float* own_dp = dp + 4 * n + 2 * r;
      own_dp[0] = __uint_as_float(two << 16) * (own_dp[0] - own.x);
      own_dp[1] = __uint_as_float(two & 0xffff0000u) * (own_dp[1] - own.y);
    }
  }
}
// Adds 8 N columns of two rows to a sum in fragment order (of 16 columns); skips rows from `left`
// on, counted from `target`.
template <int N>
__device__ __forceinline__ void dsa_add(float* target, const float* x, int64_t stride, int left) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (8 * r < left) {
      float* row = target + 8 * r * stride + threadIdx.x % 4 * 4;
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        const float *a = x + 4 * n + 2 * r, *b = a + 4;
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(row + 8 * n), "f"(a[0]),
                     "f"(a[1]), "f"(b[0]), "f"(b[1])
                     : "memory");
      }
    }
  }
}
template <int N>
__device__ __forceinline__ void dsa_times(float* x, float factor) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) x[i] *= factor;
}
// Waits for a warpgroup's turn to add to a tile of queries; `turn` counts finished warpgroups.
__device__ __forceinline__ void dsa_wait_turn(const int* turn, int own, int barrier) {
  if (threadIdx.x % 128 == 0) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != own);
  }
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void dsa_end_turn(int* turn, int barrier) {
  __threadfence();
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
  if (threadIdx.x % 128 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
  }
}
"""
)

COMPUTED = r"""
// Arrives at an unused barrier, dependent on P (never negative): otherwise ptxas would delay P
// until after the next wait for a product.
template <int N>
__device__ __forceinline__ void dsa_computed(int barrier, const float* p) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < 4 * N; i++) bits |= __float_as_uint(p[i]);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier + (bits >> 31)) : "memory");
}
"""
