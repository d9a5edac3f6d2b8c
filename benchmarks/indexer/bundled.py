"""megatron-core's TileLang indexer: selection and sparse loss.

Called in the blocks of its attention layer. Its selection keeps the selected scores for the loss,
so the loss is timed without computing them; ours computes them again.
"""

import torch

from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.errors import ImplementationError

#: The way of megatron-core's functions.
WAY = "megatron"
#: Tokens that megatron-core scores at a time, and tokens of the loss.
BLOCK, LOSS_BLOCK = 8192, 512


def require_kernels(device: torch.device) -> None:
    """Raise :class:`ImplementationError` if megatron-core's kernels cannot run."""
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    if device.type != "cuda":
        raise ImplementationError("megatron-core's TileLang indexer needs a CUDA GPU")
    if tilelang_dsa.lighting_indexer is None or tilelang_dsa.SparseIndexerKLLoss is None:
        raise ImplementationError("megatron-core's TileLang indexer needs tilelang")


def _bounds(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    return torch.zeros_like(ends), ends


def select(inputs: IndexerInputs, topk: int) -> torch.Tensor:
    """Return the selected keys ``[tokens, topk]`` in any order, padded with ``-1``.

    Raises:
        ImplementationError: megatron-core's kernels cannot run here, or decline.
    """
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    require_kernels(inputs.q.device)
    q, k, weights = inputs.q[:, None], inputs.k[:, None], inputs.weights[:, None]
    bounds = _bounds(len(inputs.q), inputs.q.device)
    with torch.no_grad():
        found = tilelang_dsa.run_fused_qk_topk(q, k, weights, topk, *bounds, BLOCK, inputs.relu)
    if found is None:
        raise ImplementationError("megatron-core's TileLang indexer declines these inputs")
    return found[0]


def sorted_lists(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists in our form, ascending with ``-1`` last, and their lengths."""
    behind = torch.iinfo(indices.dtype).max
    lists = torch.where(indices < 0, behind, indices).sort(-1).values
    return torch.where(lists == behind, -1, lists), (indices >= 0).sum(-1)


def selected_scores(inputs: IndexerInputs, indices: torch.Tensor) -> torch.Tensor:
    """Return the index scores of the listed keys ``[tokens, K]``, ``-inf`` for entries ``-1``."""
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

    require_kernels(inputs.q.device)
    starts, ends = _bounds(len(inputs.q), inputs.q.device)
    weights = inputs.weights.float()
    parts = []
    with torch.no_grad():
        for rows in _blocks(len(indices), BLOCK):
            scores, _ = tilelang_dsa.lighting_indexer(
                inputs.q[rows], inputs.k, weights[rows], starts[rows], ends[rows],
                indices.shape[1], indices[rows], inputs.relu,
            )  # fmt: skip
            parts.append(scores)
    return torch.cat(parts)


def loss_gradients(
    inputs: IndexerInputs, indices: torch.Tensor, teacher: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the KL sum; return the gradients of q, k and weights.

    Args:
        inputs: the indexer's tensors.
        indices, teacher: ``[tokens, K]``, see :func:`megatron_dsa.dsa_kernels.sparse_indexer_loss`.
        scores: of :func:`selected_scores`.
    """
    from megatron.core.transformer.experimental_attention_variant.ops import (
        tilelang_dsa,
        tilelang_indexer_bwd,
    )

    dq, dweights, dk = [], [], torch.zeros_like(inputs.k)
    for rows in _blocks(len(indices), BLOCK):
        # Slices per block, as in its layer; whole tensors would cost more.
        own, lists = scores[rows].detach().requires_grad_(), indices[rows]
        value = torch.zeros((), device=scores.device)
        for part in _blocks(len(lists), LOSS_BLOCK):
            value = tilelang_dsa._accumulate_topk_kl_chunk(
                # The kernel normalises it in place.
                target_chunk=teacher[rows][part].clone(),
                index_logits_chunk=own[part],
                valid_seq=lists[part] >= 0,
                kl_sum=value,
            )
        (grad_scores,) = torch.autograd.grad(value, own)
        part_q, part_weights, part_k = tilelang_indexer_bwd.indexer_bwd_interface(
            inputs.q[rows], inputs.weights[rows], inputs.k, lists, grad_scores, inputs.relu
        )
        dq.append(part_q)
        dweights.append(part_weights)
        dk += part_k
    return torch.cat(dq), dk, torch.cat(dweights)


def _blocks(rows: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, rows, size)]
