"""Memory of a sparse layer's core in torch, on the CPU, bounded by the workspace.

The core is everything between projections: index scores and top-k, sparse attention, sparse indexer
loss, and their gradients, in fp32. Peak memory is the process's resident high-water mark above the
inputs. Requires Linux.
"""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    indexer_topk,
    sparse_attention,
    sparse_indexer_loss,
)
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.layout.layout import bshd_layout

HEADS, QK_DIM, V_DIM, TOPK, INDEX_HEADS, INDEX_DIM = 16, 576, 512, 256, 8, 128
#: Tokens of the call that loads and compiles.
SHORT = 256
_MMAP_THRESHOLD = -3  # of mallopt


def resident(field: str) -> float:
    """Return a memory figure of this process in MiB: ``VmRSS`` (now) or ``VmHWM`` (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ImplementationError(f"no {field} in /proc/self/status: this needs Linux")


def measure_core(tokens: int, workspace_mib: int) -> Iterator[tuple[str, dict]]:
    # Freed large blocks return to the system, so the mark shows live memory.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 65536)
    policy = Policy(fused=False, workspace_bytes=workspace_mib * 2**20)
    step(min(SHORT, tokens), policy)
    peak, results, seconds = step(tokens, policy)
    yield "step", {
        "status": "ok", "ms": 1e3 * seconds, "repeats": 1, "peak_mib": peak, "results_mib": results,
        "ran": f"{torch.get_num_threads()} threads",
    }  # fmt: skip


def step(tokens: int, policy: Policy) -> tuple[float, float, float]:
    """Run forward and backward; return MiB at the peak, MiB of the results, and seconds."""

    def leaf(*shape):
        return torch.randn(*shape).requires_grad_()

    q, kv = leaf(tokens, HEADS, QK_DIM), leaf(tokens, QK_DIM)
    inputs = IndexerInputs(
        leaf(tokens, INDEX_HEADS, INDEX_DIM), leaf(tokens, INDEX_DIM), leaf(tokens, INDEX_HEADS)
    )
    grad = torch.randn(tokens, HEADS, V_DIM)
    layout = bshd_layout(tokens, 1, torch.device("cpu"))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    begin = time.perf_counter()
    indices, count = indexer_topk(inputs, layout, TOPK, policy=policy)
    result = sparse_attention(
        q, kv, indices, softmax_scale=0.05, v_dim=V_DIM, topk_length=count,
        want_p_sum=True, policy=policy,
    )  # fmt: skip
    loss = sparse_indexer_loss(
        inputs, indices, result.p_sum, layout, topk_length=count, policy=policy
    )
    torch.autograd.backward([result.out, loss], [grad, torch.ones_like(loss)])
    seconds = time.perf_counter() - begin
    results = [result.out, result.lse, result.p_sum, indices, q.grad, kv.grad]
    results += [inputs.q.grad, inputs.k.grad, inputs.weights.grad]
    kept = sum(x.numel() * x.element_size() for x in results) / 2**20
    return resident("VmHWM") - before, kept, seconds
