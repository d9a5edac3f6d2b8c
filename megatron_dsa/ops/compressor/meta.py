"""The compressor on the meta device."""

import torch

from megatron_dsa.ops.compressor.api import CompressorInputs
from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.meta import differentiable


def compress(candidate: Candidate, inputs: CompressorInputs) -> torch.Tensor:
    """Meta function of ``compressor``; ``COMPRESSOR.run`` calls it in a plan."""
    groups = inputs.groups

    def forward(values, scores, ape):
        pooled = values.new_empty(groups.first_row.shape[0], inputs.dim)
        return (pooled,), (values, scores, ape, groups.first_row, groups.position)

    def backward(values, scores, ape, *_groups):
        return torch.empty_like(values), torch.empty_like(scores), torch.empty_like(ape)

    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    tensors = (inputs.values, inputs.scores, inputs.ape)
    return differentiable(tensors, forward, backward, workspace_bytes)
