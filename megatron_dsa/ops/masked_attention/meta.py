"""Masked dense attention on the meta device."""

import torch

from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.masked_attention.bits import GROUP, WORDS, groups
from megatron_dsa.ops.masked_attention.inputs import (
    KeyBitsInputs,
    ListedProbabilities,
    MaskedAttentionInputs,
    VisibleBitsInputs,
)
from megatron_dsa.ops.meta import empty_sums, take_workspace


def key_bits(candidate: Candidate, inputs: KeyBitsInputs) -> torch.Tensor:
    """Meta function of ``key_bits``; ``KEY_BITS.run`` calls it in a plan."""
    bits = inputs.indices.new_empty(len(inputs.indices), groups(inputs.num_keys), WORDS)
    if not candidate.fused:
        take_workspace(bits, inputs.workspace_bytes)
    return bits


def visible_bits(candidate: Candidate, inputs: VisibleBitsInputs) -> torch.Tensor:
    """Meta function of ``visible_bits``; ``VISIBLE_BITS.run`` calls it in a plan."""
    bits = inputs.start.new_empty(len(inputs.start), groups(inputs.num_keys), WORDS)
    if not candidate.fused:
        take_workspace(bits, inputs.workspace_bytes)
    return bits


def forward(candidate: Candidate, inputs: MaskedAttentionInputs):
    """Meta function of ``masked_attention_forward``; ``FORWARD.run`` calls it in a plan."""
    q = inputs.q.contiguous()
    out, lse = q.new_empty(*q.shape[:2], inputs.v_dim), empty_sums(q, *q.shape[:2])
    if not candidate.fused:
        take_workspace(q, inputs.workspace_bytes)
    return out, lse


def backward(candidate: Candidate, inputs: MaskedAttentionInputs, out, lse, dout):
    """Meta function of ``masked_attention_backward``; ``BACKWARD.run`` calls it in a plan."""
    q, kv = inputs.q.contiguous(), inputs.kv.contiguous()
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    dk_pe = empty_sums(inputs.k_pe, *inputs.k_pe.shape)
    if not candidate.fused:
        take_workspace(q, inputs.workspace_bytes)
        return dq, dkv, dk_pe
    numbers, bits_t = _numbers(q), inputs.bits.new_empty(groups(len(kv)) * GROUP, groups(len(q)), 4)
    for part in inputs.head_parts():
        count = part.stop - part.start
        sums = q.new_empty(len(q), count, q.shape[2], dtype=torch.float32)
        dk_rope = inputs.k_pe.new_empty(len(kv), count, inputs.k_pe.shape[1])
        total = empty_sums(inputs.k_pe, *inputs.k_pe.shape)
        del sums, dk_rope, total
    inputs.kept["numbers"] = numbers
    del bits_t
    return dq, dkv, dk_pe


def probabilities(
    candidate: Candidate, inputs: MaskedAttentionInputs, lse, width: int, listed: slice
):
    """Meta function of ``masked_attention_probabilities``; ``PROBABILITIES.run`` calls it in a
    plan.
    """
    queries, bits = len(inputs.q), inputs.bits
    count = len(range(*listed.indices(queries)))
    found = ListedProbabilities(
        empty_sums(inputs.q, queries, width), bits.new_empty(count, width), bits.new_empty(count)
    )
    if not candidate.fused:
        take_workspace(inputs.q, inputs.workspace_bytes)
        return found
    numbers = inputs.kept.pop("numbers", None)
    numbers = _numbers(inputs.q) if numbers is None else numbers
    before = bits.new_empty(bits.shape[:2])
    del numbers, before
    return found


def _numbers(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[1], 2, groups(len(q)) * GROUP, dtype=torch.float32)
