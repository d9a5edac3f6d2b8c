"""Dense attention on the meta device."""

from collections.abc import Callable

import torch

from megatron_dsa.ops.dense_attention.blocks import BlockAttention
from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.meta import empty_sums, take_workspace


def attend(candidate: Candidate, attention: Callable, workspace_bytes: int, *args, **options):
    """Meta function of ``dense_attention``; ``DENSE_ATTENTION.run`` calls it in a plan."""
    workspace_bytes = 0 if candidate.fused else workspace_bytes

    def forward(q, k, v, causal, scale, sequences):
        take_workspace(q, workspace_bytes)
        return q.new_empty(*q.shape[:2], v.shape[2]), empty_sums(q, *q.shape[:2])

    def backward(dout, q, k, v, *_):
        take_workspace(q, workspace_bytes)
        wide = empty_sums(q, *q.shape)  # kernels add dq up in fp32
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        del wide
        return gradients

    return attention(*args, block=BlockAttention(candidate.name, forward, backward), **options)
