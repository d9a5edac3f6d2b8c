"""CUDA code that selects keys and usually reads a query's scores once.

Scores at or above a floor, estimated from a sample, become candidates in column order. If the next
chunk does not fit, only the best K remain and the floor rises above the worst of them, since ties
go to the first. If candidates are too few, scores are read again without a floor.
"""

VECTORS = 4

SOURCE = r"""
// Keys have the order of scores; -0 and +0 share a key, and no score has key 0.
__device__ __forceinline__ unsigned dsa_key(unsigned score) {
  return (int)score < 0 ? 0u - score : score | 0x80000000u;
}
// Visible scores of a query: [first, last) after `scores`, the address of a 32-byte sector.
struct dsa_row {
  const uint4* scores;
  int first, last;
};
__device__ __forceinline__ void dsa_read(unsigned* to, const uint4* from) {
  const uint4 four = __ldcs(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}
// A floor that about `wanted` scores reach, from a sample of equally spaced sectors.
template <int SECTORS, class S>
__device__ __forceinline__ unsigned dsa_guess(S& s, dsa_row row, int wanted) {
  constexpr int THREADS = S::THREADS, SAMPLE = 8 * SECTORS * THREADS;
  static_assert(SAMPLE <= S::CAPACITY, "the sample is held where the candidates are");
  const int sectors = row.last / 8;
#pragma unroll
  for (int i = 0; i < SECTORS; i++) {
    const int at = i * THREADS + threadIdx.x;
    const int sector = (long long)at * sectors / (SECTORS * THREADS);
    unsigned scores[8];
    dsa_read(scores, row.scores + 2 * sector);
    dsa_read(scores + 4, row.scores + 2 * sector + 1);
#pragma unroll
    for (int e = 0; e < 8; e++)
      s.keys[(i * 8 + e) * THREADS + threadIdx.x] =
          8 * sector + e < row.first ? 1u : dsa_key(scores[e]);
  }
  const int rank = (long long)wanted * SAMPLE / (row.last - row.first);
  const dsa_best best = dsa_find(s, SAMPLE, min(max(rank, 1), SAMPLE));
  return best.bound + (best.equal == 0);
}
// Appends scores that reach the floor to the `count` candidates, from chunk `chunk` to the last
// visible chunk or to the first that does not fit.
template <int VECTORS, class S>
__device__ __forceinline__ void dsa_stream(S& s, dsa_row row, int to_column, unsigned floor,
                                           int& count, int& chunk, int chunks) {
  constexpr int THREADS = S::THREADS, WARPS = S::WARPS, N = 4 * VECTORS;
  static_assert(VECTORS <= 4 && VECTORS * WARPS <= 32, "counts are bytes, added up by one warp");
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int vectors = (row.last + 3) / 4;
  unsigned next[N];
  auto read = [&](int first) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int vector = first + v * THREADS;
      if (vector < vectors) dsa_read(next + 4 * v, row.scores + vector);
    }
  };
  int vector = chunk * VECTORS * THREADS + thread;
  read(vector);
  for (; chunk < chunks; chunk++) {
    unsigned keys[N];
#pragma unroll
    for (int i = 0; i < N; i++) keys[i] = dsa_key(next[i]);
    const int place = 4 * vector;
    read(vector += VECTORS * THREADS);
    if (chunk == 0 || chunk + 1 == chunks) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        const int at = place + i / 4 * (4 * THREADS) + i % 4;
        if (at < row.first || at >= row.last) keys[i] = 0;
      }
    }
    // One byte per vector: counts of this thread, then prefix sums over its warp.
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < N; i++) mine += keys[i] >= floor ? 1u << i / 4 * 8 : 0u;
    unsigned sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    unsigned char* fresh = s.fresh[chunk % 2];
    if (lane == 31) {
#pragma unroll
      for (int v = 0; v < VECTORS; v++) fresh[v * WARPS + warp] = sum >> 8 * v;
    }
    sum -= mine;
    __syncthreads();
    const int of_warp = lane < VECTORS * WARPS ? fresh[lane] : 0;
    int up_to = of_warp;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, step);
      if (lane >= step) up_to += other;
    }
    const int all = __shfl_sync(~0u, up_to, 31);
    if (count + all > S::CAPACITY) return;
    up_to += count - of_warp;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      int to = __shfl_sync(~0u, up_to, v * WARPS + warp) + (sum >> 8 * v & 255);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (keys[4 * v + e] >= floor) {
          s.keys[to] = keys[4 * v + e];
          s.columns[to] = to_column + place + v * (4 * THREADS) + e;
          to++;
        }
      }
    }
    count += all;
  }
}
// Writes the columns of the `topk` best of a query's scores [start, end) to `out`, in order, then
// -1. A chunk must fit with `topk` candidates. `wanted`: candidates to aim at, topk or more.
template <int THREADS, int CAPACITY, int SECTORS, int VECTORS, int BYTES>
__device__ __forceinline__ void dsa_select(const float* scores, const int* start, const int* end,
                                           int* out, int topk, int wanted, void* shared) {
  constexpr int CHUNK = 4 * VECTORS * THREADS;
  using candidates = dsa_candidates<THREADS, CAPACITY, CAPACITY - CHUNK>;
  static_assert(sizeof(candidates) <= BYTES, "shared memory");
  candidates& s = *static_cast<candidates*>(shared);
  const int begin = *start, seen = *end - begin, thread = threadIdx.x;
  if (seen <= topk) {
    for (int i = thread; i < topk; i += THREADS) out[i] = i < seen ? begin + i : -1;
    return;
  }
  // Sectors may extend past the first and last score but stay within the tensor's memory, because
  // allocations are aligned.
  const size_t address = reinterpret_cast<size_t>(scores + begin);
  const int first = address % 32 / 4;
  const dsa_row row = {reinterpret_cast<const uint4*>(address - 4 * first), first, first + seen};
  const int chunks = (row.last + CHUNK - 1) / CHUNK;
  unsigned floor = 1;
  if (seen > CAPACITY) floor = dsa_guess<SECTORS>(s, row, wanted);
  int count = 0, chunk = 0;
  for (;;) {
    dsa_stream<VECTORS>(s, row, begin - first, floor, count, chunk, chunks);
    const bool ended = chunk == chunks;
    if (count < topk) {  // the floor was too high
      floor = 1;
      count = chunk = 0;
      __syncthreads();  // all threads have read the last chunk's counts
      continue;
    }
    const dsa_best best = dsa_find(s, count, topk);
    dsa_place(s, count, best);
    if (ended) break;
    dsa_compact(s, topk);
    count = topk;
    floor = max(best.bound, best.bound + 1);
  }
  for (int i = thread; i < topk; i += THREADS) out[i] = s.columns[s.places[i]];
}
"""
