"""CUDA source of a prefix sum over the threads of a block."""

SOURCE = r"""
// Sums `value` over the threads before this one, and over all threads. `warp_sums`, in shared
// memory, has a word per warp.
__device__ __forceinline__ int dsa_sum_before(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // all threads have read the previous call's sums
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before + sum - value;
}
"""
