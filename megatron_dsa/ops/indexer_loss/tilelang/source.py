"""CUDA source of the sparse indexer loss.

In accumulators ``[64 keys, 64 index heads]``, thread ``(warp, line, t)`` (``line``: lane / 4,
``t``: lane % 4) holds keys ``16 warp + line + {0, 8}`` and heads ``8 j + 2 t + {0, 1}``, at ``4 j +
2 (key bit) + (head bit)``. The thread's word for a block has bit ``2 j + (key bit) + 16 (head
bit)`` set if that product is positive.
"""

SOURCE = r"""
// Reads the weights of this thread's heads from shared memory.
__device__ __forceinline__ void dsa_read_weights(float* weights, int here, int thread) {
#pragma unroll
  for (int j = 0; j < 8; j++)
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
      : "=f"(weights[2 * j]), "=f"(weights[2 * j + 1]) : "r"(here + j * 32 + thread % 4 * 8)
      : "memory");
}

// Scores of a block, sum_h w_h relu(S_h), and each thread's bits of positive products.
__device__ __forceinline__ void dsa_index_scores(const float* s, const float* weights, int scores,
                                                 int words, int thread) {
  float upper = 0.f, lower = 0.f;
  unsigned word = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float x = s[4 * j + c], y = s[4 * j + 2 + c], w = weights[2 * j + c];
      // Propagate NaN.
      if (!(x <= 0.f)) { upper += w * x; word |= 1u << (2 * j + 16 * c); }
      if (!(y <= 0.f)) { lower += w * y; word |= 2u << (2 * j + 16 * c); }
    }
  }
  upper += __shfl_xor_sync(0xffffffffu, upper, 1);
  lower += __shfl_xor_sync(0xffffffffu, lower, 1);
  upper += __shfl_xor_sync(0xffffffffu, upper, 2);
  lower += __shfl_xor_sync(0xffffffffu, lower, 2);
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(words + thread * 4), "r"(word) : "memory");
  const int key = thread / 32 * 16 + thread % 32 / 4;
  if (thread % 4 == 0) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(scores + key * 4), "f"(upper) : "memory");
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(scores + key * 4 + 32), "f"(lower) : "memory");
  }
}

// Sum or maximum over a warpgroup in a fixed order; `scratch`: 4 floats, used once.
template <bool LARGEST>
__device__ __forceinline__ float dsa_over_group(float x, int scratch, int thread) {
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, step);
    x = LARGEST ? fmaxf(x, other) : x + other;
  }
  if (thread % 32 == 0)
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(scratch + thread / 8), "f"(x) : "memory");
  asm volatile("bar.sync 3, 128;" ::: "memory");
  float a, b, c, d;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
    : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(scratch) : "memory");
  return LARGEST ? fmaxf(fmaxf(a, b), fmaxf(c, d)) : (a + b) + (c + d);
}

// log(teacher / student), with `below` = log(student); exact where both are close.
__device__ __forceinline__ float dsa_log_ratio(float teacher, float student, float below) {
  const float log_2 = 0.69314718f;
  if (student > 1e-30f) return __log2f(__fdividef(teacher, student)) * log_2;
  return __log2f(teacher) * log_2 - below;
}

// Stores a value twice as bf16; returns the rounded value.
__device__ __forceinline__ float dsa_store_pair(int here, float value) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(value));
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(here), "r"(pair) : "memory");
  return __uint_as_float(pair << 16);
}

// Overwrites a list's scores with student - teacher, as a pair of equal bf16 per entry and 0 for
// invalid entries, and returns KL(teacher || student) to all threads. Both are 0 for a teacher
// without mass. Differences sum to 0, so the keys' common part has no gradient; each thread's
// smallest entry compensates the rounding of its others, which would dominate the errors of dq and
// dw. `n`: entries; `keys`: number of keys; GRADIENTS: write the differences.
template <int ENTRIES, bool GRADIENTS>
__device__ __forceinline__ float dsa_differences(int scores, const int* ids, const float* teacher,
                                                 int n, int keys, int scratch, int thread) {
  const float log2_e = 1.44269504f;
  float x[ENTRIES], t[ENTRIES];
#pragma unroll
  for (int i = 0; i < ENTRIES; i++) {
    const int entry = i * 128 + thread;
    int id = -1;
    t[i] = 0.f;
    if (entry < n) { id = ids[entry]; t[i] = teacher[entry]; }
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[i]) : "r"(scores + entry * 4) : "memory");
    if (id < 0 || id >= keys) { x[i] = -INFINITY; t[i] = 0.f; }
  }
  float most = x[0], mass = 0.f, sum = 0.f, value = 0.f;
#pragma unroll
  for (int i = 0; i < ENTRIES; i++) { most = fmaxf(most, x[i]); mass += t[i]; }
  most = dsa_over_group<true>(most, scratch, thread);
  mass = dsa_over_group<false>(mass, scratch + 16, thread);
  // A list without keys also has no mass.
  if (most == -INFINITY) most = 0.f;
  const bool trained = !(mass <= 0.f);
  const float share = trained ? __fdividef(1.f, mass) : 0.f;
#pragma unroll
  for (int i = 0; i < ENTRIES; i++) {
    x[i] -= most;
    sum += exp2f(x[i] * log2_e);
  }
  sum = dsa_over_group<false>(sum, scratch + 32, thread);
  const float part = trained ? __fdividef(1.f, sum) : 0.f, log_sum = __log2f(sum) * 0.69314718f;
  float lost = 0.f, least = INFINITY, held = 0.f;
  int place = 0;
#pragma unroll
  for (int i = 0; i < ENTRIES; i++) {
    const int entry = i * 128 + thread;
    const float s = exp2f(x[i] * log2_e) * part;
    t[i] *= share;
    if (t[i] > 0.f) value += t[i] * dsa_log_ratio(t[i], s, x[i] - log_sum);
    if (!GRADIENTS) continue;
    const float rounded = dsa_store_pair(scores + entry * 4, s - t[i]);
    if (x[i] > -INFINITY) {
      lost += s - t[i] - rounded;
      if (fabsf(rounded) < least) { least = fabsf(rounded); held = rounded; place = entry; }
    }
  }
  if (GRADIENTS && least < INFINITY) dsa_store_pair(scores + place * 4, held + lost);
  return dsa_over_group<false>(value, scratch + 48, thread);
}

// Multiplies the queries [64, 128] in shared memory by their head's weight. Swizzles permute
// 16-byte chunks within a row of 64 columns.
__device__ __forceinline__ void dsa_weigh_queries(int queries, int weights, int thread) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int chunk = i * 128 + thread, row = chunk / 8 % 64;
    unsigned x[4];
    float w;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(w) : "r"(weights + row * 4) : "memory");
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(queries + chunk * 16) : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x[j])
        : "f"(__uint_as_float(x[j] & 0xffff0000u) * w), "f"(__uint_as_float(x[j] << 16) * w));
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
      :: "r"(queries + chunk * 16), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
  }
}

// Writes a tile [64 keys, 64 heads] bf16 with 128-byte swizzle: the key's difference where the
// product is positive, else 0. `quarter`: the 16 keys of a warp. `words`, `pairs`: of the block.
__device__ __forceinline__ void dsa_masked_differences(int words, int pairs, int tile, int quarter,
                                                       int lane) {
  unsigned word, upper, lower;
  const int key = quarter * 16 + lane / 4;
  asm volatile("ld.shared.u32 %0, [%1];"
    : "=r"(word) : "r"(words + (quarter * 32 + lane) * 4) : "memory");
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(upper) : "r"(pairs + key * 4) : "memory");
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(lower) : "r"(pairs + key * 4 + 32) : "memory");
  const int line = quarter * 16 + lane % 16;
  const int place = tile + line * 128 + ((lane / 16 ^ line % 8) << 4);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned x[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      // Two bits, 16 apart, times 16 bits: each half is the difference or 0.
      x[j] = (word >> (4 * i + j) & 0x00010001u) * (j % 2 ? lower : upper);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(place ^ (i * 32)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
  }
}

// Gradients of a query's heads: dq = w g, dw = q . g, where g = sum_j differences_j [product > 0]
// k_j are accumulators [64 heads, 128]. `rows`: number of heads.
__device__ __forceinline__ void dsa_query_results(const float* g, const void* q_, void* dq_,
                                                  float* dw, int weights, int rows, int thread) {
  const unsigned* q = static_cast<const unsigned*>(q_);
  unsigned* dq = static_cast<unsigned*>(dq_);
  const int t = thread % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + r * 8;
    float sum = 0.f, w = 0.f;
    if (row < rows) {
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(w) : "r"(weights + row * 4) : "memory");
      unsigned x[16];
#pragma unroll
      for (int j = 0; j < 16; j++) x[j] = q[row * 64 + j * 4 + t];
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const float a = g[4 * j + 2 * r], b = g[4 * j + 2 * r + 1];
        sum += a * __uint_as_float(x[j] << 16) + b * __uint_as_float(x[j] & 0xffff0000u);
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x[j]) : "f"(b * w), "f"(a * w));
        dq[row * 64 + j * 4 + t] = x[j];
      }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (row < rows && t == 0) dw[row] = sum;
  }
}
"""
