"""The compressor on the meta device."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Candidate
from megatron_dsa.ops.compressor.inputs import CompressorInputs
from megatron_dsa.ops.meta import differentiable


def compress(candidate: Candidate, inputs: CompressorInputs) -> torch.Tensor:
    """Meta function of ``compressor``; ``COMPRESSOR.run`` calls it in a plan."""
    groups = inputs.groups

    def forward(values, scores, ape):
        pooled = values.new_empty(groups.first_row.shape[0], inputs.dim)
        sums: list[torch.Tensor] = []
        if candidate.fused:
            from megatron_dsa.ops.compressor.triton.launch import softmax_sums

            sums = softmax_sums(inputs, pooled)
        kept = (values, scores, ape, groups.first_row, groups.position, *sums)
        return (pooled, *sums), kept

    def backward(values, scores, ape, *_):
        return torch.empty_like(values), torch.empty_like(scores), torch.empty_like(ape)

    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    tensors = (inputs.values, inputs.scores, inputs.ape)
    return differentiable(tensors, forward, backward, workspace_bytes)
