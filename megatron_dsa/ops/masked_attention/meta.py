"""Masked dense attention on the meta device."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Candidate
from megatron_dsa.ops.masked_attention.bits import WORDS, groups
from megatron_dsa.ops.masked_attention.inputs import KeyBitsInputs, MaskedAttentionInputs
from megatron_dsa.ops.meta import empty_sums, take_workspace


def key_bits(candidate: Candidate, inputs: KeyBitsInputs) -> torch.Tensor:
    """Meta function of ``key_bits``; ``KEY_BITS.run`` calls it in a plan."""
    bits = inputs.indices.new_empty(len(inputs.indices), groups(inputs.num_keys), WORDS)
    if not candidate.fused:
        take_workspace(bits, inputs.workspace_bytes)
    return bits


def forward(_candidate: Candidate, inputs: MaskedAttentionInputs):
    """Meta function of ``masked_attention_forward``; ``FORWARD.run`` calls it in a plan."""
    q = inputs.q
    out, lse = q.new_empty(*q.shape[:2], inputs.v_dim), empty_sums(q, *q.shape[:2])
    take_workspace(q, inputs.workspace_bytes)
    return out, lse


def backward(_candidate: Candidate, inputs: MaskedAttentionInputs, out, lse, dout):
    """Meta function of ``masked_attention_backward``; ``BACKWARD.run`` calls it in a plan."""
    dq, dkv = torch.empty_like(inputs.q), torch.empty_like(inputs.kv)
    dk_pe = empty_sums(inputs.k_pe, *inputs.k_pe.shape)
    take_workspace(inputs.q, inputs.workspace_bytes)
    return dq, dkv, dk_pe


def probabilities(_candidate: Candidate, inputs: MaskedAttentionInputs, lse, width: int):
    """Meta function of ``masked_attention_probabilities``; ``PROBABILITIES.run`` calls it in a
    plan.
    """
    p_sum = empty_sums(inputs.q, len(inputs.q), width)
    take_workspace(inputs.q, inputs.workspace_bytes)
    return p_sum
