"""The indexer's losses on the meta device."""

import torch

from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.indexer_loss.inputs import (
    DenseLossInputs,
    IndexerGradients,
    SparseLoss,
    SparseLossInputs,
)
from megatron_dsa.ops.meta import differentiable, empty_sums, take_workspace


def sparse(candidate: Candidate, inputs: SparseLossInputs) -> SparseLoss:
    """Meta function of ``sparse_indexer_loss``; ``SPARSE_LOSS.run`` calls it in a plan."""
    x, gradients = inputs.indexer, None
    value = empty_sums(x.q)
    if inputs.want_gradients:
        dk, dweights = empty_sums(x.k, *x.k.shape), empty_sums(x.weights, *x.weights.shape)
        gradients = IndexerGradients(inputs.query_gradient(), dk, dweights)
        if candidate.fused:
            gradients = gradients._replace(k=dk.clone())
    if not candidate.fused:
        take_workspace(x.q, inputs.workspace_bytes)
    return SparseLoss(value, gradients)


def dense(_candidate: Candidate, inputs: DenseLossInputs) -> torch.Tensor:
    """Meta function of ``dense_indexer_loss``; ``DENSE_LOSS.run`` calls it in a plan."""
    x = inputs.indexer

    def forward(q, k, weights):
        # The gradients are formed in the forward: summed wide, and kept as narrow as the inputs.
        dk, dweights = empty_sums(k, *k.shape), empty_sums(weights, *weights.shape)
        kept = torch.empty_like(q), dk.to(k.dtype), dweights.to(weights.dtype)
        return (empty_sums(q), *kept), kept

    def backward(*kept):
        return tuple(torch.empty_like(gradient) for gradient in kept)

    return differentiable((x.q, x.k, x.weights), forward, backward, inputs.workspace_bytes)
