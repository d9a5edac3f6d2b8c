"""Calls to CUDA functions from TileLang programs."""

# Postponed annotations would hide shapes from TileLang.
from tilelang import language as T

#: Fence against hoisted loads, which would exhaust the registers.
NO_HOISTING = r"""
__device__ __forceinline__ void dsa_no_hoisting() { asm volatile("" ::: "memory"); }
"""
ADDRESSES = r"""
__device__ __forceinline__ int dsa_here(const void* what) {
  return static_cast<int>(__cvta_generic_to_shared(what));
}
// Keeps TileLang from reusing a buffer's memory before this line.
__device__ __forceinline__ void dsa_keep(const void* a, const void* b) {}
"""


def call(function: str, *arguments, of: tuple = (), returns: str = "handle"):
    if of:
        constants = (str(x).lower() if isinstance(x, bool) else str(x) for x in of)
        function += f"<{', '.join(constants)}>"
    return T.call_extern(returns, function, *arguments)


def shared_address(element):
    return call("dsa_here", T.address_of(element), returns="int32")
