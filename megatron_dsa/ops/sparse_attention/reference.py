"""Sparse attention, stated as plainly as possible. Differentiable; materialises everything."""

import torch


def sparse_attention(
    q, kv, indices, *, v_dim, softmax_scale, topk_length=None, sink=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out [Sq, H, v_dim]``, ``lse [Sq, H]`` (natural log, keys only, ``-inf`` if empty).

    Shapes as in :class:`megatron_dsa.ops.sparse_attention.inputs.SparseAttentionInputs`.
    """
    valid = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        valid &= torch.arange(indices.shape[1], device=q.device) < topk_length[:, None]
    rows = torch.cat([kv, kv.new_zeros(1, kv.shape[1])])
    keys = rows[torch.where(valid, indices, kv.shape[0]).long()]  # [Sq, K, D]
    logits = torch.einsum("qhd,qkd->qhk", q, keys) * softmax_scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    # An empty row has no softmax; its probabilities are 0, not 0/0.
    safe = torch.where(total == float("-inf"), 0.0, total)
    p = torch.exp(logits - safe[..., None])
    return torch.einsum("qhk,qkd->qhd", p, keys[..., :v_dim]), lse
