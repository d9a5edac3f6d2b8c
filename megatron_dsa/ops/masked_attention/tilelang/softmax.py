"""CUDA softmax of the forward; registers are laid out as in :mod:`.gradients`."""

from megatron_dsa.ops.hopper.cuda import ADDRESSES

SOURCE = (
    ADDRESSES
    + r"""
// Sets scores of unselected keys to -inf.
template <int N>
__device__ __forceinline__ void dsa_select(float* score, unsigned upper, unsigned lower) {
  if ((upper & lower) == (N == 16 ? ~0u : (1u << 2 * N) - 1)) return;
#pragma unroll
  for (int i = 0; i < 4 * N; i++) {
    const unsigned word = i % 4 / 2 ? lower : upper;
    if (!(word & 1u << (i / 4 * 2 + i % 2))) score[i] = -INFINITY;
  }
}
// P = exp2(score * scale - top) in place. Sums of P cover this thread's columns and are multiplied
// by `decay` where `top` rises.
template <int N>
__device__ __forceinline__ void dsa_softmax(float* score, float* top, float* total, float* decay,
                                            float scale) {
  // Several chains per row hide the latency of dependent operations.
  float part[8];
#pragma unroll
  for (int i = 0; i < 8; i++) part[i] = score[i];
#pragma unroll
  for (int i = 8; i < 4 * N; i++) part[i % 8] = fmaxf(part[i % 8], score[i]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float *a = part + 2 * r, *b = a + 4;
    float peak = fmaxf(fmaxf(a[0], a[1]), fmaxf(b[0], b[1]));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2)) * scale;
    // P up to 2^8 is allowed, so that sums are rarely rescaled.
    const float raised = peak > top[r] + 8 ? peak : top[r];
    decay[r] = exp2f(top[r] - raised);
    top[r] = raised;
  }
  float sum[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4 * N; i++) {
    score[i] = exp2f(fmaf(score[i], scale, -top[i % 4 / 2]));
    sum[i % 4] += score[i];
  }
  total[0] = total[0] * decay[0] + (sum[0] + sum[1]);
  total[1] = total[1] * decay[1] + (sum[2] + sum[3]);
}
template <int N>
__device__ __forceinline__ void dsa_scale(float* x, const float* factor) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) x[i] *= factor[i % 4 / 2];
}
template <int N>
__device__ __forceinline__ void dsa_rescale(float* x, const float* factor) {
  if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) dsa_scale<N>(x, factor);
}
// Arrives at an unused barrier, dependent on the sums of P (never negative): otherwise ptxas would
// delay P until after the next wait for a product.
__device__ __forceinline__ void dsa_computed(int barrier, const float* total) {
  const unsigned sign = (__float_as_uint(total[0]) | __float_as_uint(total[1])) >> 31;
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier + sign) : "memory");
}
// Adds the sums of a row's four threads; factor: the inverse, 0 for a row without keys.
__device__ __forceinline__ void dsa_finish(float* total, float* factor) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    factor[r] = total[r] == 0 ? 0 : 1 / total[r];
  }
}
"""
)
