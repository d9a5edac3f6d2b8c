"""Unions of adjacent queries' key lists, with a membership bit per query.

With few heads, a tile holds several adjacent queries, which select nearly the same keys. Unions are
sorted like :func:`~megatron_dsa.ops.sparse_attention.lists.ascending_lists`.

A thread block marks keys in shared-memory bitmaps, :data:`RANGE` keys at a time. A key that a query
lists twice, as top-k never does, is repeated at the end.
"""

from tilelang import language as T

from megatron_dsa.ops.hopper import prefix_sums
from megatron_dsa.ops.hopper.programs import compiler

#: Number of keys whose bitmaps, 8 KiB per query, fit shared memory.
RANGE = 65536
THREADS = 256

SOURCE = r"""
// indices, length, places (slots): of the group's `queries` queries; ids, members: the group's list
// of `capacity` entries. Words in shared memory: marks, GROUP * RANGE / 32; before, RANGE / 32;
// small, sums and the counter of repeated keys. Only PLACES uses places and before.
template <int GROUP, int RANGE, bool PLACES>
__device__ __forceinline__ void dsa_union(const int* indices, const int* length, int queries,
                                          int width, int keys, int* ids, unsigned char* members,
                                          int capacity, int* count, int* places, void* marks_,
                                          void* before_, void* small) {
  constexpr int WORDS = RANGE / 32;
  unsigned* marks = static_cast<unsigned*>(marks_);
  int* before = static_cast<int*>(before_);
  int* repeated = static_cast<int*>(small);
  int* warp_sums = repeated + 1;
  const int thread = threadIdx.x, threads = blockDim.x;
  int written = 0;
  if (thread == 0) *repeated = 0;
  __syncthreads();
  for (int first = 0; first < keys; first += RANGE) {
    const int words = (min(keys - first, RANGE) + 31) / 32;
    for (int g = 0; g < GROUP; ++g)
      for (int w = thread; w < words; w += threads) marks[g * WORDS + w] = 0;
    __syncthreads();
    for (int g = 0; g < queries; ++g) {
      const int* list = indices + (long long)g * width;
      const int n = length[g];
      for (int i = thread; i < n; i += threads) {
        const int id = list[i];
        if (id < first || id >= keys || id - first >= RANGE) continue;
        const unsigned bit = 1u << (id & 31);
        if (atomicOr(&marks[g * WORDS + (id - first) / 32], bit) & bit) {
          const int at = capacity - 1 - atomicAdd(repeated, 1);
          ids[at] = id;
          members[at] = 1 << g;
        }
      }
    }
    __syncthreads();
    const int share = (words + threads - 1) / threads;
    const int from = min(thread * share, words), to = min(from + share, words);
    int mine = 0;
    for (int w = from; w < to; ++w) {
      unsigned any = 0;
      for (int g = 0; g < GROUP; ++g) any |= marks[g * WORDS + w];
      mine += __popc(any);
    }
    int total;
    int at = written + dsa_sum_before(mine, warp_sums, total);
    for (int w = from; w < to; ++w) {
      unsigned of[GROUP], any = 0;
      for (int g = 0; g < GROUP; ++g) any |= of[g] = marks[g * WORDS + w];
      if (PLACES) before[w] = at;
      for (; any; any &= any - 1, ++at) {
        const int bit = __ffs(any) - 1;
        unsigned member = 0;
        for (int g = 0; g < GROUP; ++g) member |= (of[g] >> bit & 1u) << g;
        ids[at] = first + w * 32 + bit;
        members[at] = member;
      }
    }
    written += total;
    __syncthreads();
    if (!PLACES) continue;
    for (int g = 0; g < queries; ++g) {
      const int n = length[g];
      for (int i = thread; i < n; i += threads) {
        const int id = indices[(long long)g * width + i];
        if (id < first || id >= keys || id - first >= RANGE) continue;
        const int w = (id - first) / 32;
        unsigned any = 0;
        for (int h = 0; h < GROUP; ++h) any |= marks[h * WORDS + w];
        places[(long long)g * width + i] = before[w] + __popc(any & ((1u << (id & 31)) - 1));
      }
    }
    __syncthreads();
  }
  // Move repeated keys forward from the end of the list.
  const int again = *repeated;
  for (int i = 0; i < again; i += threads) {
    int id = 0, member = 0;
    const int from = capacity - again + i + thread;
    if (i + thread < again) { id = ids[from]; member = members[from]; }
    __syncthreads();
    if (i + thread < again) {
      ids[written + i + thread] = id;
      members[written + i + thread] = member;
    }
    __syncthreads();
  }
  if (thread == 0) *count = written + again;
}
"""


def build(group: int, with_slots: bool = False):
    """Return the TileLang program for unions of ``group`` adjacent queries' lists.

    Arguments are contiguous. Invalid Indices are skipped; Length is within ``[0, K]``; Ids and
    Members end at Count; Slots (``with_slots``) gets the union index of each valid entry.
    """
    queries, width, groups, capacity = T.dynamic("queries, width, groups, capacity")

    @T.prim_func
    def key_unions(
        Indices: T.Tensor([queries, width], "int32"),
        Length: T.Tensor([queries], "int32"),
        Ids: T.Tensor([groups, capacity], "int32"),
        Members: T.Tensor([groups, capacity], "uint8"),
        Count: T.Tensor([groups], "int32"),
        Slots: T.Tensor([queries, width] if with_slots else [1, 1], "int32"),
        keys: T.int32,
    ):
        with T.Kernel(groups, threads=THREADS) as block:
            T.import_source(prefix_sums.SOURCE + SOURCE)
            marks = T.alloc_shared([group * RANGE // 32], "uint32")
            before = T.alloc_shared([RANGE // 32 if with_slots else 1], "int32")
            small = T.alloc_shared([1 + THREADS // 32], "int32")
            T.call_extern(
                "handle",
                f"dsa_union<{group}, {RANGE}, {str(with_slots).lower()}>",
                T.address_of(Indices[block * group, 0]),
                T.address_of(Length[block * group]),
                T.min(group, queries - block * group),
                width,
                keys,
                T.address_of(Ids[block, 0]),
                T.address_of(Members[block, 0]),
                capacity,
                T.address_of(Count[block]),
                T.address_of(Slots[block * group if with_slots else 0, 0]),
                T.address_of(marks[0]),
                T.address_of(before[0]),
                T.address_of(small[0]),
            )

    return key_unions


compiled = compiler(build)
