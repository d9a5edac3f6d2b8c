"""CUDA code that finds a thread block's best candidates by repeated histograms.

Scores are mapped to unsigned integers of the same order and counted in equal intervals between the
smallest and the largest. The interval of the k-th largest is split again, usually once, at most
three times.
"""

BINS = 1024

SOURCE = r"""
// Shared memory of a thread block that selects up to TOPK.
template <int THREADS_, int CAPACITY_, int TOPK>
struct dsa_candidates {
  static constexpr int THREADS = THREADS_, CAPACITY = CAPACITY_, WARPS = THREADS / 32;
  static constexpr int EACH = DSA_BINS / THREADS;
  unsigned keys[CAPACITY];
  int columns[CAPACITY];
  union {
    int bins[DSA_BINS + THREADS];  // see bin()
    unsigned short places[TOPK];   // slots of the best candidates
  };
  unsigned extremes[2][WARPS];
  int sums[WARPS];
  int found[3];
  unsigned char fresh[2][32];  // candidates per read of a warp
  // A thread sums EACH adjacent bins; a spare word after them avoids bank conflicts.
  static __device__ __forceinline__ int bin(int i) { return i + i / EACH; }
};
// The best are the keys above `bound` and the first `equal` keys equal to it.
struct dsa_best {
  unsigned bound;
  int equal;
};
// Finds the `k` best of the first `count` keys, 1 <= k <= count. Keys are positive.
template <class S>
__device__ __forceinline__ dsa_best dsa_find(S& s, int count, int k) {
  constexpr int THREADS = S::THREADS, EACH = S::EACH;
  const int thread = threadIdx.x;
  __syncthreads();  // all keys are written, and all `places` are read
  unsigned low = ~0u, high = 0;
  for (int i = thread; i < count; i += THREADS) {
    low = min(low, s.keys[i]);
    high = max(high, s.keys[i]);
  }
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  if (thread % 32 == 0) {
    s.extremes[0][thread / 32] = low;
    s.extremes[1][thread / 32] = high;
  }
  for (int i = thread; i < DSA_BINS + THREADS; i += THREADS) s.bins[i] = 0;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < S::WARPS; w++) {
    low = min(low, s.extremes[0][w]);
    high = max(high, s.extremes[1][w]);
  }
  for (;;) {
    const unsigned range = high - low;
    const int shift = max(0, 32 - __clz(range) - DSA_LOG_BINS);
#pragma unroll 4
    for (int i = thread; i < count; i += THREADS) {
      const unsigned above = s.keys[i] - low;
      if (above <= range) atomicAdd(&s.bins[s.bin(above >> shift)], 1);
    }
    __syncthreads();
    // Thread 0 sums the highest bins.
    const int first = DSA_BINS - EACH - thread * EACH;
    int counts[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int& bin = s.bins[s.bin(first + i)];
      sum += counts[i] = bin;
      bin = 0;
    }
    int total, above = dsa_sum_before(sum, s.sums, total);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
      if (above < k && k <= above + counts[i]) {
        s.found[0] = first + i;
        s.found[1] = above;
        s.found[2] = counts[i];
      }
      above += counts[i];
    }
    __syncthreads();
    const int inside = s.found[2];
    k -= s.found[1];
    low += (unsigned)s.found[0] << shift;
    if (inside == k) return {low - 1, 0};
    if (shift == 0) return {low, k};
    high = low + min(high - low, (1u << shift) - 1);
  }
}
// Writes the slots of the best of the first `count` candidates, in order.
template <class S>
__device__ __forceinline__ void dsa_place(S& s, int count, dsa_best best) {
  // An odd number of candidates per thread avoids bank conflicts.
  const int each = (count + S::THREADS - 1) / S::THREADS | 1;
  const int from = min((int)threadIdx.x * each, count), to = min(from + each, count);
  int mine = 0;  // number above the bound; upper half: equal to it
  for (int i = from; i < to; i++) {
    const unsigned key = s.keys[i];
    mine += key > best.bound ? 1 : key == best.bound ? 1 << 16 : 0;
  }
  int total;
  const int before = dsa_sum_before(mine, s.sums, total);
  int above = before & 0xffff, equal = before >> 16;
  for (int i = from; i < to; i++) {
    const unsigned key = s.keys[i];
    const bool better = key > best.bound, tie = key == best.bound;
    if (better || (tie && equal < best.equal)) s.places[above + min(equal, best.equal)] = i;
    above += better;
    equal += tie;
  }
  __syncthreads();
}
// Moves the `k` best candidates to the front.
template <class S>
__device__ __forceinline__ void dsa_compact(S& s, int k) {
  constexpr int THREADS = S::THREADS, EACH = 4;
#pragma unroll 1
  for (int first = threadIdx.x; first - (int)threadIdx.x < k; first += EACH * THREADS) {
    unsigned keys[EACH];
    int columns[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int place = s.places[min(first + i * THREADS, k - 1)];
      keys[i] = s.keys[place];
      columns[i] = s.columns[place];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int to = first + i * THREADS;
      if (to < k) {
        s.keys[to] = keys[i];
        s.columns[to] = columns[i];
      }
    }
    __syncthreads();
  }
}
""".replace("DSA_LOG_BINS", str(BINS.bit_length() - 1)).replace("DSA_BINS", str(BINS))
