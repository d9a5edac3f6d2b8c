"""CUDA code that divides the index scores' work among thread blocks."""

SOURCE = r"""
// Blocks of keys {first, end} visible to queries of a tile; {0, 0} if there are none.
template <int ROWS, int KEYS>
__device__ __forceinline__ int2 dsa_seen(const int* start, const int* end, int tile, int rows) {
  int low = 0x7fffffff, high = 0;
#pragma unroll 8
  for (int row = tile * ROWS; row < min(tile * ROWS + ROWS, rows); row++) {
    const int first = start[row], last = end[row];
    if (first < last) {
      low = min(low, first);
      high = max(high, last);
    }
  }
  return low < high ? make_int2(low / KEYS, (high + KEYS - 1) / KEYS) : make_int2(0, 0);
}
// This thread block's share of all blocks of keys: {tile, blocks to skip in it, blocks}.
// `sums` [THREADS / 32] and `share` [3] are in shared memory.
template <int ROWS, int KEYS, int THREADS>
__device__ __forceinline__ void dsa_share(const int* start, const int* end, int rows, int* sums,
                                          int* share) {
  const int tiles = (rows + ROWS - 1) / ROWS, each = (tiles + THREADS - 1) / THREADS;
  const int from = min((int)threadIdx.x * each, tiles), to = min(from + each, tiles);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int count = 0;
  for (int tile = from; tile < to; tile++) {
    const int2 seen = dsa_seen<ROWS, KEYS>(start, end, tile, rows);
    count += seen.y - seen.x;
  }
  int sum = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  if (threadIdx.x < 3) share[threadIdx.x] = 0;
  __syncthreads();
  int before = sum - count, all = 0;
  for (int i = 0; i < THREADS / 32; i++) {
    if (i < warp) before += sums[i];
    all += sums[i];
  }
  const int first = (int)((long long)all * blockIdx.x / gridDim.x);
  const int last = (int)((long long)all * (blockIdx.x + 1) / gridDim.x);
  if (first < last && before <= first && first < before + count) {
    int tile = from;
    for (;; tile++) {
      const int2 seen = dsa_seen<ROWS, KEYS>(start, end, tile, rows);
      if (first < before + seen.y - seen.x) break;
      before += seen.y - seen.x;
    }
    share[0] = tile;
    share[1] = first - before;
    share[2] = last - first;
  }
  __syncthreads();
}
// Blocks {first, count} of a share's next tile: visible ones without `skip`, at most the share's
// remaining `left`.
template <int ROWS, int KEYS>
__device__ __forceinline__ void dsa_span(int* span, const int* start, const int* end, int tile,
                                         int rows, int skip, int left) {
  const int2 seen = dsa_seen<ROWS, KEYS>(start, end, tile, rows);
  span[0] = seen.x + skip;
  span[1] = min(seen.y - span[0], left);
}
"""
